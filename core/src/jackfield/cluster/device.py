"""The lease on devices that engines and replicas share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import attrs

from jackfield.clock import Clock


@attrs.define(eq=False)
class DeviceLease:
    """A lease on devices for one role at a time, which may have several holders.

    A phase requests it once its inputs are ready, and never waits for another phase while it holds the lease. So the
    lease cannot deadlock. Requests are served in order.
    """

    _clock: Clock
    _seconds: float  #: deadline for acquiring the lease, and for a hand-over
    #: awaited when the role changes, with the previous role (None at first) and the new one
    hand_over: Callable[[str | None, str], Awaitable[None]] | None = None
    _role: str | None = attrs.field(default=None, init=False)  #: the role that holds the lease, or held it last
    _holders: int = attrs.field(default=0, init=False)
    _resident: str | None = attrs.field(default=None, init=False)  #: the role whose state is on the devices
    _waiting: dict[object, str] = attrs.field(factory=dict, init=False)  #: roles of the requests, in order
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _handing_over: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    @asynccontextmanager
    async def hold(self, role: str, *, joins: bool = False) -> AsyncIterator[None]:
        """Hold the devices for ``role``.

        Args:
            role: Role that uses the devices.
            joins: Join a current holder of the same role ahead of other requests, because it waits for this one.

        Raises:
            DeadlineExceeded: If another role holds the devices for too long; it is named.
        """
        request = object()

        def is_granted() -> bool:
            """Return whether no other role holds the lease or waited before."""
            first = next(each for each, other in self._waiting.items() if each is request or other != role)
            free = not self._holders or self._role == role
            return free and (first is request or (joins and self._holders > 0))

        async def acquire() -> None:
            while not is_granted():
                await self._changed.wait()
            self._role = role
            self._holders += 1

        self._waiting[request], who = role, f"the devices, for {role}, while {self._role} holds them"
        try:
            await self._clock.wait_for(acquire(), self._seconds, who)
        finally:
            del self._waiting[request]
            self._wake()
        try:
            async with self._handing_over:
                before = self._resident
                if before != role and self.hand_over is not None:
                    what = f"the hand-over of devices from {before} to {role}"
                    await self._clock.wait_for(self.hand_over(before, role), self._seconds, what)
                self._resident = role
            yield
        finally:
            self._holders -= 1
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
