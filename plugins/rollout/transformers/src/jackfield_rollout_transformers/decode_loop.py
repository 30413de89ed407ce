"""The decode loop: a worker thread runs forward passes; sequences join and leave between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jackfield_huggingface.generating import generating
from jackfield_rollout_transformers.decoder import Decoder, Sequence

T = TypeVar("T")


class DecodeLoop:
    """The batch of a replica.

    A task on the event loop alternates between two states: a *hop*, in which the worker thread runs forward passes and
    nothing else touches the batch, and the time between hops, in which sequences join and leave. Operations on the
    batch (abort, pause, sleep, update) hold :meth:`between_hops`, so they run after the current pass.
    """

    def __init__(
        self, steps_per_hop: int, may_run: Callable[[], bool], made: Callable[[Sequence], None], threads: str
    ) -> None:
        """Create the loop. A hop has at most ``steps_per_hop`` passes, while no stream runs.

        ``may_run`` says whether passes may run now, and is also called in the worker thread; ``made`` gets each stream
        that has new tokens, and each sequence that has ended.
        """
        self.waiting: deque[Sequence] = deque()
        self.work = asyncio.Event()  #: there may be something to do
        self.executor = ThreadPoolExecutor(1, thread_name_prefix=threads)
        self.decoder: Decoder
        self._steps_per_hop, self._may_run, self._made = steps_per_hop, may_run, made
        self._discarded: list[Sequence] = []  #: sequences in the batch whose callers have left
        self._arrived = False  #: whether a sequence joined or left since the last hop
        self._drained = asyncio.Event()  #: set while nothing is generated
        self._draining = False
        self._batch_lock = asyncio.Lock()
        self._visitors = 0

    @property
    def running(self) -> int:
        """Return the number of running sequences."""
        return self.decoder.running - sum(each.row >= 0 for each in self._discarded)

    async def generate(self, sequence: Sequence) -> None:
        """Generate a sequence to its end, or raise its error. Cancelling removes it from the batch."""
        self.waiting.append(sequence)
        self._note_change()
        try:
            await sequence.done
        except BaseException:
            if sequence in self.waiting:
                self.waiting.remove(sequence)
            else:
                self._discarded.append(sequence)
            self._note_change()
            raise

    def _note_change(self) -> None:
        self._arrived = True
        self._note_drained()
        self.work.set()

    async def serve(self, stopped: Callable[[], bool], failed: Callable[[Exception], Awaitable[None]]) -> None:
        """Decode until the server is stopped; ``failed`` gets a pass's exception."""
        while not stopped():
            await self.work.wait()
            self.work.clear()
            try:
                generating.add(self)
                while self._runnable():
                    async with self._batch_lock:
                        ended = await self._hop()
                    for _ in range(2 if ended else 0):
                        await asyncio.sleep(0)  # callers of these may have another request: let it join the next hop
            except Exception as error:
                self.decoder.release()
                self._discarded.clear()
                await failed(error)
            finally:
                generating.discard(self)

    def _runnable(self) -> bool:
        return self._may_run() and (self.running > 0 or (bool(self.waiting) and not self._draining))

    async def _hop(self) -> bool:
        """Let sequences join and leave, then run some passes; return whether sequences ended."""
        self.remove_discarded()
        if not self._runnable():
            return False
        count = 0 if self._draining else self.decoder.choose_joiners(self.waiting)
        joiners = [self.waiting.popleft() for _ in range(count)]
        self._arrived = False
        streams = [each for each in (*self.decoder.sequences, *joiners) if each.running.stream is not None]
        steps = 1 if streams else self._steps_per_hop
        ended = await self.in_thread(self.decoder.run, joiners, steps, self._interrupted, self._held)
        early = [each for each in joiners if each.row < 0 and each not in ended and each not in self._discarded]
        self.waiting.extendleft(reversed(early))
        for sequence in dict.fromkeys((*streams, *ended)):
            self._made(sequence)
        self._note_drained()
        return bool(ended)

    def _interrupted(self) -> bool:
        return self._arrived or self._held()

    def _held(self) -> bool:
        return self._visitors > 0 or not self._may_run()

    def remove_discarded(self) -> None:
        """Remove sequences whose callers have left; only between hops."""
        self.decoder.remove(self._discarded)
        self._discarded.clear()

    @contextlib.asynccontextmanager
    async def between_hops(self) -> AsyncIterator[None]:
        """Hold off forward passes inside the block."""
        self._visitors += 1
        try:
            async with self._batch_lock:
                yield
        finally:
            self._visitors -= 1

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self.executor, functools.partial(function, *arguments))

    async def drain(self) -> bool:
        """Finish running sequences and let none join; return False if :meth:`go_on` interrupted it."""
        self._draining = True
        self._note_drained()
        try:
            await self._drained.wait()
            return self._draining
        finally:
            self._draining = False
            self.work.set()

    def _note_drained(self) -> None:
        if self.running == 0:
            self._drained.set()
        else:
            self._drained.clear()

    def go_on(self) -> None:
        """Resume work, and end a :meth:`drain`."""
        self._draining = False
        self._drained.set()
        self.work.set()

    def release(self) -> int:
        """Empty the batch, to be computed again; return the bytes of its KV cache. Only between hops."""
        self.remove_discarded()
        kept = self.decoder.sequences
        freed = self.decoder.release()
        self.waiting.extendleft(reversed(kept))
        return freed
