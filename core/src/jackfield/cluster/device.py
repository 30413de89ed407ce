"""The lease on devices that several roles share, and the hand-over between engines and replicas."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

from jackfield.abc.rollout import SleepRequest, WakeUpRequest
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import JackfieldError
from jackfield.routing.health import LOST
from jackfield.runtime.engine_group import EngineGroup
from jackfield.weights import ProbeAnswer, Replica, ReplicaProbe, SyncReport

HandOver = Callable[[], Awaitable[object]]


class DeviceLease:
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
        """Grant the lease, in order, to all waiters that may hold it together with its holders."""
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


class SharedDevice:
    """The hand-overs of a lease between engines and replicas, and a synchronisation that wakes replicas first."""

    def __init__(
        self, engines: Sequence[EngineGroup], pool: ReplicaPool, device: str, probe: ReplicaProbe | None = None
    ) -> None:
        """
        Args:
            engines: Those of every model that the trainer works with on the device.
            pool: Replicas that work there in turns with them.
            device: Where engines work.
            probe: Replicas answer it when they have the device; the engine compares when it has it again, before it
                trains. None: there is no comparison.
        """
        self._engines, self._pool, self._device, self._probe = engines, pool, device, probe
        self._unasked: int | None = None  # a version that replicas have and have not answered the probe with
        self._answers: list[ProbeAnswer] = []

    @property
    def hand_overs(self) -> tuple[dict[str, HandOver], dict[str, HandOver]]:
        """Return what a role does when it comes to the device, and when it leaves."""
        return (
            {"rollout": self.enter_rollout, "train": self.enter_train},
            {"rollout": self.leave_rollout, "train": self.leave_train},
        )

    async def enter_train(self) -> None:
        """Bring the engines to the device."""
        await self._move(self._device)
        answers, self._answers = self._answers, []
        if self._probe is not None and answers:
            await self._probe.compare(answers)

    async def leave_train(self) -> None:
        """Move the engines off the device."""
        await self._move("cpu")

    async def enter_rollout(self) -> None:
        """Give the replicas room for weights and KV cache."""
        await self._wake_up(WakeUpRequest())
        version, self._unasked = self._unasked, None
        if version is not None:
            await self.ask(self._pool.members, version)

    async def leave_rollout(self) -> None:
        """Have the replicas give weights and KV cache back."""
        await self._pool.each(lambda server: server.sleep(SleepRequest(level=1)))

    async def sync(self, version: int) -> SyncReport:
        """Synchronise while the engines hold the device: the replicas take room for the weights alone."""
        await self._wake_up(WakeUpRequest(tags=("weights",)))
        report = await self._pool.sync(version)
        self._unasked = version
        return report

    async def ask(self, replicas: Sequence[Replica], version: int) -> None:
        """Have replicas that have ``version`` answer the probe, while they have the device. The dead do not answer."""
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
