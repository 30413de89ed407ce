"""The requests of a server: who waits, who is generated, and how they end."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from jackfield.errors import JackfieldError
from jackfield_rollout_transformers.sequence import Sequence


class Requests:
    """All that are unfinished, by name. Of one event loop; what runs forward passes sees them between hops."""

    def __init__(self) -> None:
        self.active: dict[str, Sequence] = {}
        self.waiting: deque[Sequence] = deque()
        self.discarded: list[Sequence] = []  #: whose callers left, and that are in the batch still
        self.arrived = False  #: somebody has come or left since the last hop
        self.work = asyncio.Event()  #: there may be something to do
        self.drained = asyncio.Event()  #: nothing is generated

    @property
    def running(self) -> int:
        """Return the number of requests that are generated."""
        return len(self.active) - len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        """One more waits."""
        self.active[sequence.request.request_id] = sequence
        self.waiting.append(sequence)
        self.arrived = True
        self.work.set()

    def join(self, count: int) -> list[Sequence]:
        """The first of those who wait are generated from now on."""
        joiners = [self.waiting.popleft() for _ in range(count)]
        self.arrived = False
        return joiners

    def streams(self) -> list[Sequence]:
        """Those whose tokens are wanted as they come."""
        return [one for one in self.active.values() if one.stream is not None]

    def settle(self, sequence: Sequence, version: int) -> None:
        """Hand a finished sequence, whose last tokens are of ``version``, to its caller, unless he left."""
        if self.active.get(sequence.request.request_id) is not sequence:
            return
        del self.active[sequence.request.request_id]
        sequence.stamp(version)
        if sequence.stream is not None:
            if sequence.error is None:
                sequence.stream.put_nowait(sequence.next_chunk())
            sequence.stream.put_nowait(None)
        if sequence.ended.done():
            return
        if sequence.error is None:
            sequence.ended.set_result(None)
        else:
            sequence.ended.set_exception(sequence.error)

    def feed(self, sequence: Sequence, version: int) -> None:
        """Give a stream what has come since the last chunk."""
        if sequence.finish_reason is None and sequence.error is None and sequence.stream is not None:
            sequence.stamp(version)
            if len(sequence.token_ids) > sequence.streamed:
                sequence.stream.put_nowait(sequence.next_chunk())

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence whose caller has left; no effect on one that has ended."""
        if self.active.get(sequence.request.request_id) is not sequence:
            return
        del self.active[sequence.request.request_id]
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.discarded.append(sequence)
        self.arrived = True
        self.note_drained()
        self.work.set()

    def reject_all(self, reason: Callable[[], JackfieldError | None]) -> None:
        """Fail everything unfinished."""
        for sequence in list(self.active.values()):
            self.discard(sequence)
            if not sequence.ended.done():
                error = reason()
                assert error is not None
                sequence.ended.set_exception(error)
            if sequence.stream is not None:
                sequence.stream.put_nowait(None)
        self.note_drained()

    def note_drained(self) -> None:
        """After the number of those that are generated may have changed."""
        if self.running == 0:
            self.drained.set()
        else:
            self.drained.clear()
