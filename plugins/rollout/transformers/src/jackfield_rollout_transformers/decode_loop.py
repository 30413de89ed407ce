"""The decode loop: forward passes in a worker thread, and callers that come and go between them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
)
from jackfield.errors import JackfieldError, RolloutError
from jackfield_rollout_transformers.decoder import Decoder
from jackfield_rollout_transformers.requests import Requests
from jackfield_rollout_transformers.sequence import Sequence

T = TypeVar("T")

MEMORY = ("weights", "kv_cache")


class DecodeLoop:
    """The batch of a replica.

    A task on the event loop alternates between two states: a *hop*, in which the worker thread runs forward passes and
    nothing else touches the batch, and the time between hops, in which callers come and go. What changes the batch
    (abort, pause, sleep, update) holds :meth:`between_hops` and so comes after the pass that is running.
    """

    def __init__(self, replica: int, steps_per_hop: int) -> None:
        self.requests = Requests()
        self.version = 0  #: of the weights
        self.paused = self.draining = self.stopped = False
        self.awake: set[str] = set(MEMORY)  #: what has not been given back by a sleep
        self.stale: str | None = None  #: why the weights cannot be used
        self.task: asyncio.Task[None] | None = None
        self.executor: ThreadPoolExecutor | None = None
        self.decoder: Decoder
        self._replica = replica
        self._steps_per_hop = steps_per_hop
        self._batch_lock = asyncio.Lock()
        self._visitors = 0
        self._failure: str | None = None

    async def serve(self) -> None:
        """Decode until the server is stopped."""
        while not self.stopped:
            await self.requests.work.wait()
            self.requests.work.clear()
            try:
                while self._runnable():
                    async with self._batch_lock:
                        ended = await self._hop()
                    if ended:
                        await asyncio.sleep(0)  # who waited for these may have a next request: let it join the next hop
            except Exception as error:
                self._fail(error)

    def _runnable(self) -> bool:
        if self.paused or self.refusal() is not None or len(self.awake) < len(MEMORY):
            return False
        return self.requests.running > 0 or (bool(self.requests.waiting) and not self.draining)

    async def _hop(self) -> bool:
        """Let callers in and out, then run some passes; whether requests ended."""
        self.decoder.remove(self.requests.discarded)
        self.requests.discarded.clear()
        if not self._runnable():
            return False
        count = 0 if self.draining else self.decoder.choose_joiners(self.requests.waiting)
        joiners, streams = self.requests.join(count), self.requests.streams()
        steps = 1 if streams else self._steps_per_hop
        ended = await self.in_thread(self.decoder.run, joiners, steps, self._interrupted)
        for sequence in ended:
            self.requests.settle(sequence, self.version)
        for sequence in streams:
            self.requests.feed(sequence, self.version)
        self.requests.note_drained()
        return bool(ended)

    def _interrupted(self) -> bool:
        return self._visitors > 0 or self.requests.arrived or self.stopped or self.stale is not None

    @contextlib.asynccontextmanager
    async def between_hops(self) -> AsyncIterator[None]:
        """Inside, no forward pass runs."""
        self._visitors += 1
        try:
            async with self._batch_lock:
                yield
        finally:
            self._visitors -= 1

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in the worker thread."""
        assert self.executor is not None
        return await asyncio.get_running_loop().run_in_executor(self.executor, functools.partial(function, *arguments))

    # -- callers -------------------------------------------------------------------------------------------------------

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; when it returns they generate no more."""
        async with self.between_hops():
            active = self.requests.active
            chosen = [active[name] for name in request.request_ids or active if name in active]
            for sequence in chosen:
                self._end_early(sequence)
        return AbortResult(request_ids=tuple(sequence.request.request_id for sequence in chosen))

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding; when it returns no forward pass runs."""
        if request.mode == "wait" and not self.paused:
            self.draining = True
            self.requests.note_drained()
            try:
                # ends with the requests that run, at their limits; resume and stop end it, too
                await self.requests.drained.wait()
                if not self.draining:
                    return PauseResult(running=self.requests.running)
            finally:
                self.draining = False
                self.requests.work.set()
        async with self.between_hops():
            self.paused = True
            if request.mode == "abort":
                for sequence in [one for one in self.requests.active.values() if one.row >= 0]:
                    self._end_early(sequence)
        return PauseResult(running=self.requests.running)

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        self.paused = self.draining = False
        self.requests.drained.set()
        self.requests.work.set()
        return ResumeResult(running=self.requests.running)

    def _end_early(self, sequence: Sequence) -> None:
        """Abort; between hops only."""
        if sequence.row >= 0:
            self.decoder.remove([sequence])
        else:
            self.requests.waiting.remove(sequence)
        sequence.finish_reason = "abort"
        self.requests.settle(sequence, self.version)
        self.requests.note_drained()

    def _fail(self, error: Exception) -> None:
        self._failure = line(error)
        self.requests.reject_all(lambda: self._failed(error))
        self.requests.discarded.clear()
        self.decoder.release()

    def _failed(self, cause: BaseException | None = None) -> RolloutError:
        refusal = self.error(
            f"the decode loop failed: {self._failure}",
            "rollout.failed",
            fix="see the cause; a successful update starts it again",
        )
        refusal.__cause__ = cause
        return refusal

    def refusal(self) -> RolloutError | None:
        """Why nothing can be generated, if so."""
        if self.stopped or self.task is None:
            return self.error("the server is not running", "rollout.stopped", fix="start it, or make a new one")
        if self._failure is not None:
            return self._failed()
        if self.stale is not None:
            return self.error(self.stale, "rollout.stale", fix="send a full update")
        return None

    def require_running(self) -> None:
        """
        Raises:
            RolloutError: ``rollout.stopped``.
        """
        if self.stopped or self.task is None:
            raise self.error("the server is not running", "rollout.stopped", fix="start it, or make a new one")

    def error(self, message: str, code: str, **details: Any) -> RolloutError:
        """Return an error that names the replica."""
        return RolloutError(message, code=code, where=f"replica {self._replica}", **details)

    def enter_version(self, version: int) -> None:
        """Decode with the weights of another version from now on."""
        for sequence in self.requests.active.values():
            sequence.stamp(self.version)
        self.version = version
        self.stale = self._failure = None
        self.requests.work.set()

    def become_stale(self, reason: str) -> None:
        """Refuse every request until an update succeeds."""
        self.stale = reason
        self.requests.reject_all(self.refusal)


def line(error: BaseException) -> str:
    """Return what an error says, in one line."""
    if isinstance(error, JackfieldError):
        return error.message
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return f"{type(error).__name__}: {error}"
