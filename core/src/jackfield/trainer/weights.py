"""Weights of the engine for replicas: of this process, and of explorers in other processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress

import attrs

from jackfield.abc.rollout import GenerateResult, SleepRequest, UpdateWeightsRequest, WakeUpRequest
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError
from jackfield.routing import LOST, Replica
from jackfield.runtime.engine import EngineGroup
from jackfield.settings import structure
from jackfield.trainer.log_prob_check import ReplicaProbe
from jackfield.trainer.role import WEIGHTS, Role
from jackfield.weights import WeightsSynced, WeightSynchronizer, verify

_NOTHING = WeightsSynced(version=-1)


async def publish(role: Role, report: WeightsSynced | None, version: int) -> None:
    """Tell explorers in other processes how to load the trainer's weights of ``version``.

    ``report`` comes from the newest weight sync. None means that the weights are those of the model's folder. A
    checkpoint engine that keeps no weights for workers that join later is refused (``weights.transfer``).
    """
    if report is not None and (report.retained is None or report.kind == "delta"):
        message = "the checkpoint engine keeps no weights for explorers that come and go"
        expected = "one with the capability 'retains_weights' (file)"
        fix = "choose checkpoint_engine: {name: file, folder: …}"
        raise WeightsError(message, where="checkpoint_engine", expected=expected, fix=fix)
    await role.queue.post(WEIGHTS, attrs.asdict(attrs.evolve(report or _NOTHING, version=version, receipts=())))


@attrs.define(kw_only=True, eq=False)
class WeightSubscriber:
    """Loads each published version into this process's replicas, verifies the receipts, and lets the explorer go on.

    It is the weight source of an explorer.
    """

    role: Role
    replicas: Sequence[Replica]  #: the pool's own list, which changes as replicas come and go
    takes_turns: bool = attrs.field(default=False, init=False)
    newest: WeightsSynced = attrs.field(default=_NOTHING, init=False)  #: the newest weights that all replicas have
    loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while replicas load weights

    async def run(self) -> None:
        """Follow the trainer until cancelled.

        Errors are ``weights.version`` if the trainer's version went back, and those of a weight sync.
        """
        number, queue = 0, self.role.queue
        while True:
            try:
                notice = await queue.wait_notice(WEIGHTS, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # consumers of newer weights have their own deadlines
            number, published = notice.number, structure(WeightsSynced, notice.value, WEIGHTS, WeightsError)
            try:
                async with self.role.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                with suppress(DeadlineExceeded):
                    await queue.wait_notice(WEIGHTS, number, 0.0)
                    continue  # newer weights exist, and these may have been removed
                raise
            await self.role.version.advance(published.version)

    async def load_all(self, published: WeightsSynced) -> None:
        """Load published weights into all replicas. It raises the errors of :meth:`run`."""
        async with self.loading:
            found, newest, fix = published.version, self.newest.version, "start this explorer again"
            if found < newest:
                what = "the trainer went back to earlier weights, which replicas do not take"
                raise WeightsError(what, code="weights.version", expected=f"at least {newest}", found=found, fix=fix)
            if published != self.newest:  # a restored trainer may publish a version again
                await asyncio.gather(*(self._load(replica, published) for replica in list(self.replicas)))
            self.newest = published

    @asynccontextmanager
    async def hold(self) -> AsyncIterator[None]:
        """Hold newer versions back, and the devices for replicas."""
        async with self.role.rollout_devices.hold("rollout", joins=True), self.loading:
            yield

    async def load(self, replica: Replica) -> None:
        """Load the newest weights into a replica that joins, inside :meth:`hold`."""
        async with self.role.measure("load_weights", "weights", max(self.newest.version, 0)):
            await self._load(replica, self.newest)

    async def _load(self, replica: Replica, published: WeightsSynced) -> None:
        if published.retained is None:
            return  # the replica has the weights of the model's folder
        engine, seconds = self.role.config.checkpoint_engine, self.role.config.deadlines.sync
        request = UpdateWeightsRequest(
            version=published.version,
            checkpoint_engine=engine.name,
            checkpoint_engine_config=engine.settings,
            connect=(published.retained,) * replica.info.workers,
            first_worker=0,
            total_workers=replica.info.workers,
            kind="full" if published.peft_config is None else "adapter",
            peft_config=published.peft_config,
            deadline_seconds=seconds,
        )
        who = f"replica {replica.number} to take weights {published.version}"
        receipt = await self.role.clock.wait_for(replica.server.update_weights(request), seconds, who)
        verify(replica.info, receipt, published.version, published.digests)


@attrs.define(kw_only=True, eq=False)
class EngineWeights:
    """Brings the weights of this process's engine to replicas: new versions, and the current one to those that join.

    It is the weight source of a process that trains. If engines and replicas take turns on a device, it also moves
    them off and on.
    """

    role: Role
    engines: Mapping[str, EngineGroup]  #: the loaded models: actor, and reference and critic once they are loaded
    pool: ReplicaPool | None = None  #: replicas of this process, if it has any
    takes_turns: bool = attrs.field(init=False)
    probe: ReplicaProbe | None = attrs.field(default=None, init=False)
    synchronizer: WeightSynchronizer = attrs.field(init=False)
    #: the version that replicas have loaded but not yet answered the probe with
    _unasked: int | None = attrs.field(default=None, init=False)
    _answers: list[tuple[Replica, GenerateResult]] = attrs.field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        """Compare replicas at hand-overs if they take turns with the engine, otherwise after each transfer."""
        role, config = self.role, self.role.config
        self.synchronizer = WeightSynchronizer(
            senders=[rank.sender for rank in role.workers.ranks["actor"] if rank.sender is not None],
            replicas=[] if self.pool is None else self.pool.members,
            name=config.checkpoint_engine.name,
            clock=role.clock,
            settings=config.checkpoint_engine.settings,
            deadline_seconds=config.deadlines.sync,
            kind=config.weights.kind,
            on_missing_base=config.weights.on_missing_base,
        )
        if config.log_prob_check.probe_tokens:
            self.probe = ReplicaProbe(role=role, actor=self.engines["actor"])
        self.takes_turns = role.workers.shares_devices and config.cluster.offload and self.pool is not None
        if self.takes_turns:
            role.train_devices.hand_over = self.hand_over
        elif self.probe is not None:
            self.synchronizer.check = self.probe.check

    async def sync(self, version: int) -> WeightsSynced:
        """Send a version to all replicas; those that take turns with engines allocate only their weights."""
        if self.pool is None:
            return await self.synchronizer.sync(version)
        if self.takes_turns:
            await self.pool.each(lambda server: server.wake_up(WakeUpRequest(tags=("weights",))))
        report = await self.pool.sync(version, self._send)
        self._unasked = version
        return report

    async def _send(self, version: int) -> WeightsSynced:
        if not self.synchronizer.replicas and self.role.name != "train":  # otherwise it also sends for other processes
            return WeightsSynced(version=version)
        return await self.synchronizer.sync(version)

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Block training and weight syncs, and give replicas the device."""
        return self.role.train_devices.hold("rollout", joins=True)

    async def load(self, replica: Replica) -> None:
        """Send the current weights to a replica that joins or was restarted, inside :meth:`hold`."""
        version = self.role.updated
        async with self.role.measure("load_weights", "weights", version):
            if version:  # version 0 is the model's folder, which the replica has loaded
                async with self.engines["actor"].reading:
                    await self.synchronizer.catch_up(replica, version)
            if self.takes_turns:
                await self._ask([replica], version)

    async def hand_over(self, before: str | None, role: str) -> None:
        """Move engines off or back, and let replicas sleep or wake up, when the lease's role changes."""
        assert self.pool is not None
        if before == "rollout":
            await self.pool.each(lambda server: server.sleep(SleepRequest(level=1)))
        if role == "train" or before == "train":
            device = self.role.config.cluster.device if role == "train" else "cpu"
            await asyncio.gather(*(engine.to(device) for engine in self.engines.values()))
        if role == "train":
            answers, self._answers = self._answers, []
            if self.probe is not None and answers:
                await self.probe.compare(answers)
        else:
            await self.pool.each(lambda server: server.wake_up(WakeUpRequest()))
            version, self._unasked = self._unasked, None
            if version is not None:
                await self._ask(self.pool.members, version)

    async def _ask(self, replicas: Sequence[Replica], version: int) -> None:
        """Let live replicas with ``version`` answer the probe, while they have the device."""
        if self.probe is None:
            return
        try:
            self._answers += await self.probe.ask(replicas, version)
        except JackfieldError as error:
            if error.code not in LOST:
                raise
