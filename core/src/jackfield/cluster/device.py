"""The lease on devices that engines and replicas share, and the hand-over between them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import attrs

from jackfield.abc.rollout import SleepRequest, WakeUpRequest
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import JackfieldError
from jackfield.routing import LOST, Replica
from jackfield.runtime.engine import EngineGroup
from jackfield.weights import ProbeAnswer, ReplicaProbe, SyncReport


@attrs.define(eq=False)
class DeviceLease:
    """A lease on devices for one role at a time, which may have several holders.

    A phase requests it once its inputs are ready, and never waits for another phase while it holds the lease. So the
    lease cannot deadlock. Requests are served in order.
    """

    _clock: Clock
    _seconds: float  #: deadline for acquiring the lease, and for a hand-over
    #: awaited when the role changes, with the previous role (None at first) and the new one
    _hand_over: Callable[[str | None, str], Awaitable[None]] | None = None
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
                if before != role and self._hand_over is not None:
                    what = f"the hand-over of devices from {before} to {role}"
                    await self._clock.wait_for(self._hand_over(before, role), self._seconds, what)
                self._resident = role
            yield
        finally:
            self._holders -= 1
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@attrs.define(eq=False)
class SharedDevice:
    """Moves engines and replicas on and off a device, and wakes replicas for weight syncs."""

    _engines: Sequence[EngineGroup]  #: engines of all models that use the device
    _pool: ReplicaPool  #: replicas that use the device in turns with them
    _device: str  #: device of the engines
    #: replicas answer while they have the device, and the engine compares when it is back; None: no probe
    _probe: ReplicaProbe | None = None
    #: the version that replicas have loaded but not yet answered the probe with
    _unasked: int | None = attrs.field(default=None, init=False)
    _answers: list[ProbeAnswer] = attrs.field(factory=list, init=False)

    async def hand_over(self, before: str | None, role: str) -> None:
        """Move engines off or back, and let replicas sleep or wake up, when the role changes."""
        if before == "rollout":
            await self._pool.each(lambda server: server.sleep(SleepRequest(level=1)))
        if role == "train" or before == "train":
            device = self._device if role == "train" else "cpu"
            await asyncio.gather(*(engine.to(device) for engine in self._engines))
        if role == "train":
            answers, self._answers = self._answers, []
            if self._probe is not None and answers:
                await self._probe.compare(answers)
        else:
            await self._pool.each(lambda server: server.wake_up(WakeUpRequest()))
            version, self._unasked = self._unasked, None
            if version is not None:
                await self.ask(self._pool.members, version)

    async def sync(self, version: int) -> SyncReport:
        """Sync weights while engines hold the device; replicas allocate only their weights."""
        await self._pool.each(lambda server: server.wake_up(WakeUpRequest(tags=("weights",))))
        report = await self._pool.sync(version)
        self._unasked = version
        return report

    async def ask(self, replicas: Sequence[Replica], version: int) -> None:
        """Let live replicas with ``version`` answer the probe, while they have the device."""
        if self._probe is None:
            return
        try:
            self._answers += await self._probe.ask(replicas, version)
        except JackfieldError as error:
            if error.code not in LOST:
                raise
