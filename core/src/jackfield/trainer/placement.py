"""Who works on devices that several roles share."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

from jackfield.clock import Clock

__all__ = ["PlacementLease"]

HandOver = Callable[[], Awaitable[object]]


class PlacementLease:
    """One lease on a group of devices, held by one role at a time; a role may hold it many times at once.

    A phase takes it only once its inputs are ready and never waits for another phase while it holds it, so it cannot
    deadlock. Requests are served in order. When the role changes, ``leave`` of the old and ``enter`` of the new role
    run (sleep and wake-up, offload and load).
    """

    def __init__(
        self,
        clock: Clock,
        seconds: float,
        *,
        enter: Mapping[str, HandOver] | None = None,
        leave: Mapping[str, HandOver] | None = None,
    ) -> None:
        self._clock = clock
        self._seconds = seconds
        self._enter = dict(enter or {})
        self._leave = dict(leave or {})
        self._role: str | None = None  # who holds the lease
        self._holders = 0
        self._resident: str | None = None  # whose state is on the devices
        self._waiting: deque[tuple[str, asyncio.Future[None]]] = deque()
        self._hand_over = asyncio.Lock()

    @asynccontextmanager
    async def hold(self, role: str, *, joins: bool = False) -> AsyncIterator[None]:
        """Hold the devices for ``role``.

        Args:
            role: for whom.
            joins: come in together with a holder of this role even before others who wait: it waits for us.

        Raises:
            DeadlineExceeded: naming the role that holds them.
        """
        await self._acquire(role, joins)
        try:
            await self._bring_in(role)
            yield
        finally:
            self._release()

    async def _acquire(self, role: str, joins: bool) -> None:
        if (joins and self._role == role) or (not self._waiting and self._role in (None, role)):
            self._role = role
            self._holders += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((role, turn))
        try:
            await self._clock.wait_for(turn, self._seconds, f"the devices, for {role}, while {self._role} holds them")
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._release()  # granted in the moment in which we gave up
            else:
                self._waiting = deque(item for item in self._waiting if item[1] is not turn)
                self._grant()
            raise

    def _release(self) -> None:
        self._holders -= 1
        self._grant()

    def _grant(self) -> None:
        """Let in, in order, everybody who may hold the lease together with whoever holds it."""
        if self._holders == 0:
            self._role = None
        while self._waiting and self._role in (None, self._waiting[0][0]):
            role, turn = self._waiting.popleft()
            if not turn.done():
                self._role = role
                self._holders += 1
                turn.set_result(None)

    async def _bring_in(self, role: str) -> None:
        async with self._hand_over:
            if self._resident == role:
                return
            for actions, name in ((self._leave, self._resident), (self._enter, role)):
                if name is not None and name in actions:
                    await self._clock.wait_for(actions[name](), self._seconds, f"the hand-over of devices by {name}")
            self._resident = role
