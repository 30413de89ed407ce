"""The lease on devices that several roles share, and the hand-over between engines and replicas."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import attrs

from jackfield.abc.rollout import SleepRequest, WakeUpRequest
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import JackfieldError
from jackfield.routing.router import LOST
from jackfield.runtime.engine_group import EngineGroup
from jackfield.weights import ProbeAnswer, Replica, ReplicaProbe, SyncReport


@attrs.frozen(eq=False)
class _Turn:
    """A request for the lease."""

    role: str
    joins: bool


@attrs.define(eq=False)
class DeviceLease:
    """One lease on a group of devices, held by one role at a time; a role may hold it many times at once.

    A phase takes it only once its inputs are ready and never waits for another phase while it holds it, so it cannot
    deadlock. Requests are served in order.
    """

    _clock: Clock
    _seconds: float  #: deadline of a wait for the lease, and of a hand-over
    #: awaited when the role changes, with the role before (None: there was none) and the new one
    _hand_over: Callable[[str | None, str], Awaitable[None]] | None = None
    _role: str | None = attrs.field(default=None, init=False)  #: that holds the lease, or held it last
    _holders: int = attrs.field(default=0, init=False)
    _resident: str | None = attrs.field(default=None, init=False)  #: the role whose state is on the devices
    _waiting: list[_Turn] = attrs.field(factory=list, init=False)
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _handing_over: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    @asynccontextmanager
    async def hold(self, role: str, *, joins: bool = False) -> AsyncIterator[None]:
        """Hold the devices for ``role``.

        Args:
            role: for whom.
            joins: come in together with a holder of this role even before others who wait: it waits for us.

        Raises:
            DeadlineExceeded: naming the role that holds them.
        """
        turn, who = _Turn(role, joins), f"the devices, for {role}, while {self._role} holds them"
        self._waiting.append(turn)
        try:
            await self._clock.wait_for(self._acquire(turn), self._seconds, who)
        finally:
            self._waiting.remove(turn)
            self._wake()
        try:
            await self._bring_in(role)
            yield
        finally:
            self._holders -= 1
            self._wake()

    async def _acquire(self, turn: _Turn) -> None:
        while not self._may_hold(turn):
            await self._changed.wait()
        self._role = turn.role
        self._holders += 1

    def _may_hold(self, turn: _Turn) -> bool:
        """Return whether a request can be granted: together with the holders, and after those that came before."""
        if self._holders and self._role != turn.role:
            return False
        first = next(each for each in self._waiting if each is turn or each.role != turn.role)
        return first is turn or (turn.joins and self._holders > 0)

    def _wake(self) -> None:
        """Look at all requests again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _bring_in(self, role: str) -> None:
        async with self._handing_over:
            before = self._resident
            if before != role and self._hand_over is not None:
                what = f"the hand-over of devices from {before} to {role}"
                await self._clock.wait_for(self._hand_over(before, role), self._seconds, what)
            self._resident = role


@attrs.define(eq=False)
class SharedDevice:
    """The hand-overs of a lease between engines and replicas, and a synchronisation that wakes replicas first."""

    _engines: Sequence[EngineGroup]  #: of every model that the trainer works with on the device
    _pool: ReplicaPool  #: replicas that work there in turns with them
    _device: str  #: where engines work
    #: replicas answer it when they have the device, and the engine compares when it has it again; None: nothing does
    _probe: ReplicaProbe | None = None
    #: a version that replicas have and have not answered the probe with
    _unasked: int | None = attrs.field(default=None, init=False)
    _answers: list[ProbeAnswer] = attrs.field(factory=list, init=False)

    async def hand_over(self, before: str | None, role: str) -> None:
        """Move memory when the role changes: engines leave or come back, replicas sleep or wake up."""
        if before == "rollout":
            await self._pool.each(lambda server: server.sleep(SleepRequest(level=1)))
        elif before == "train":
            await self._move("cpu")
        if role == "train":
            await self._move(self._device)
            answers, self._answers = self._answers, []
            if self._probe is not None and answers:
                await self._probe.compare(answers)
        else:
            await self._wake_up(WakeUpRequest())
            version, self._unasked = self._unasked, None
            if version is not None:
                await self.ask(self._pool.members, version)

    async def sync(self, version: int) -> SyncReport:
        """Synchronise while the engines hold the device: the replicas take room for the weights alone."""
        await self._wake_up(WakeUpRequest(tags=("weights",)))
        report = await self._pool.sync(version)
        self._unasked = version
        return report

    async def ask(self, replicas: Sequence[Replica], version: int) -> None:
        """Let replicas that have ``version`` answer the probe, while they have the device. The dead do not answer."""
        if self._probe is None:
            return
        servers = {replica.info.replica: replica.server for replica in replicas}
        try:
            self._answers += await self._probe.ask(servers, version)
        except JackfieldError as error:
            if error.code not in LOST:
                raise

    async def _move(self, device: str) -> None:
        await asyncio.gather(*(engine.to(device) for engine in self._engines))

    async def _wake_up(self, request: WakeUpRequest) -> None:
        await self._pool.each(lambda server: server.wake_up(request))
