"""A process of a pool that one holder keeps for several calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield_user_code._parent import Forked
from jackfield_user_code.workers import UserCodePool, WorkerResult, _Slot


@attrs.frozen(eq=False)
class HeldWorker:
    """A process of a pool that serves one holder, which calls functions that share state."""

    _pool: UserCodePool
    _slot: _Slot
    _process: Forked

    @property
    def pid(self) -> int | None:
        """Return the process id."""
        return self._process.pid

    async def call(
        self, arguments: Mapping[str, Any], seconds: float, name: str = "", function: str = "call"
    ) -> WorkerResult:
        """Call a function as :meth:`UserCodePool.call` does, but never again in another process.

        After a deadline, and if a cancelled call does not end in a moment, the process is gone: calls have the status
        ``died``.
        """
        if self._process.is_ending:
            death = await self._process.kill()
            return WorkerResult(status="died", error=str(self._pool._death(self.pid, death, f"had to answer {name}")))
        try:
            text = json.dumps(dict(arguments))
        except (TypeError, ValueError) as error:
            return WorkerResult(status="failed", error=f"the arguments of {function} are not JSON: {error}")
        return await self._pool._made(self._slot, function, text, seconds, name, self._process)

    async def release(self, *, kill: bool = False) -> None:
        """Give the process back, or kill it, so that the next holder gets another one."""
        try:
            if kill:
                await self._process.kill()
        finally:
            self._pool._free(self._slot)


async def hold(pool: UserCodePool) -> HeldWorker:
    """Return a process, when one is free, that serves its holder alone until the release, and keeps its state.

    It is for functions that run alone in their process. A process that dies is not replaced before the release.

    Raises:
        RunError: ``worker.start`` if the process cannot start.
    """
    if pool._about is None:
        await pool.start()
    assert not pool._is_async, "a process that makes many calls at a time is not held"
    await pool._turns.acquire()
    slot = pool._idle.pop()
    try:
        return HeldWorker(pool, slot, await pool._running(slot))
    except BaseException:
        pool._free(slot)
        raise
