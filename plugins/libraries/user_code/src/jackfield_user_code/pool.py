"""Several worker processes behind one queue of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RunError
from jackfield_user_code.workers import UserCodeWorker, WorkerLimits, WorkerResult


class UserCodePool:
    """Several workers behind one fair queue: calls are served in the order in which they came.

    Takes the arguments of :class:`UserCodeWorker`; ``workers``, the number of processes; and ``logs`` in the place of
    ``log``: worker ``n`` prints to the file ``{logs}-{n}.log``.
    """

    def __init__(
        self,
        target: str,
        *,
        method: str = "__call__",
        keywords: Mapping[str, Any] | None = None,
        workers: int = 1,
        limits: WorkerLimits | None = None,
        clock: Clock | None = None,
        python: str | None = None,
        logs: str | None = None,
    ) -> None:
        self._target = target
        self._limits = limits or WorkerLimits()
        self._clock = clock or Clock()
        self._workers = [
            UserCodeWorker(
                target,
                method=method,
                keywords=keywords,
                limits=self._limits,
                clock=self._clock,
                python=python,
                log=None if logs is None else Path(f"{logs}-{number}.log"),
            )
            for number in range(workers)
        ]
        self._idle = list(reversed(self._workers))
        self._free = asyncio.Semaphore(workers)
        self._waiting = 0

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that exist now."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    async def start(self) -> None:
        """Start one process now, to see early that the code can be loaded. The others start when they are needed.

        Raises:
            RunError: ``worker.start``.
        """
        async with self._worker(self._limits.start_seconds) as worker:
            await worker.start()

    async def call(
        self,
        arguments: Mapping[str, Any],
        deadline_seconds: float,
        call_seconds: float | None = None,
        name: str = "",
    ) -> WorkerResult:
        """Call the function in the next free process. What cannot start is a failed result, with the reason.

        Args:
            arguments: keyword arguments of the function, JSON values.
            deadline_seconds: for everything, the wait for a free process included.
            call_seconds: for the function alone; None: what is left of the deadline.
            name: of the call, for messages: the sample that is scored.
        """
        began = self._clock.time()
        try:
            async with self._worker(deadline_seconds) as worker:
                left = round(max(deadline_seconds - (self._clock.time() - began), 0.0), 3)
                return await worker.call(arguments, left if call_seconds is None else min(left, call_seconds), name)
        except DeadlineExceeded as error:
            return WorkerResult(status="timeout", error=str(error))
        except RunError as error:
            return WorkerResult(status="failed", error=str(error))

    async def close(self) -> None:
        """Kill all processes. May be called again; a later call starts them again."""
        await asyncio.gather(*(worker.close() for worker in self._workers))

    @asynccontextmanager
    async def _worker(self, seconds: float) -> AsyncIterator[UserCodeWorker]:
        if self._free.locked():
            self._waiting += 1
            try:
                who = f"one of {len(self._workers)} workers of {self._target}, {self._waiting} calls waiting"
                await self._clock.wait_for(self._free.acquire(), seconds, who)
            finally:
                self._waiting -= 1
        else:
            await self._free.acquire()
        worker = self._idle.pop()
        try:
            yield worker
        finally:
            self._idle.append(worker)
            self._free.release()
