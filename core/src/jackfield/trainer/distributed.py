"""A trainer, explorers and rewards in processes of their own: what they publish through the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

import attrs

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.queue import TransferQueue
from jackfield.settings import structure
from jackfield.trainer.role import Progress, Role
from jackfield.weights import Replica, SyncReport, WeightSynchronizer, verify

_TOPIC, FINISHED = "weights", "finished"  #: topics of the queue: the newest weights, and the end of the last step

_NOTHING = SyncReport(version=-1, receipts=(), seconds=0.0, paused_seconds=0.0, bytes=0)


async def trainer_begun(role: Role) -> None:
    """Wait until the trainer has begun: from then on the queue stays the one that it is.

    Raises:
        DeadlineExceeded: names the trainer.
    """
    seconds = role.config.deadlines.batch
    await role.clock.wait_for(role.queue.wait_notice(_TOPIC, 0, 2 * seconds), seconds, "the trainer to begin")


async def trainer_finished(role: Role, done: Callable[[], int], seconds: float) -> None:
    """Wait until the trainer has done its last step.

    Args:
        role: Another one of the run.
        done: How much work there was; while it grows, the wait goes on.
        seconds: The longest time without either.

    Raises:
        DeadlineExceeded: names the trainer and the explorers.
    """
    who = "the trainer to finish, or the explorers to bring a group"
    while True:
        before = done()
        try:
            await role.clock.wait_for(role.queue.wait_notice(FINISHED, 0, 2 * seconds), seconds, who)
            return
        except DeadlineExceeded:
            if done() == before:
                raise


class PublishedVersion(Progress):
    """The trainer's version, published to explorers in other processes."""

    def __init__(self, clock: Clock, queue: TransferQueue, weights: WeightSynchronizer) -> None:
        """
        Args:
            clock: Time source for all waits.
            queue: Where it is published.
            weights: Knows its newest synchronisation.
        """
        super().__init__(clock)
        self._queue, self._weights = queue, weights

    async def advance(self, value: int) -> None:
        """Raise the number, and publish it with how to get these weights.

        Raises:
            WeightsError: ``weights.transfer``: the checkpoint engine keeps nothing for workers that come later.
        """
        await super().advance(value)
        report = self._weights.last or _NOTHING
        if report is not _NOTHING and (report.retained is None or report.kind == "delta"):
            raise WeightsError(
                "the checkpoint engine keeps no weights for explorers that come and go",
                where="checkpoint_engine",
                expected="one with the capability 'retains_weights' (file)",
                fix="choose checkpoint_engine: {name: file, folder: …}",
            )
        await self._queue.post(_TOPIC, attrs.asdict(attrs.evolve(report, version=value, receipts=())))


@attrs.define(kw_only=True, eq=False)
class WeightSubscriber:
    """Loads each published version into this process's replicas, then lets the explorer go on.

    Receipts prove what the replicas have loaded.
    """

    role: Role
    replicas: Sequence[Replica]  #: the live list of them
    newest: SyncReport = attrs.field(default=_NOTHING, init=False)  #: that all replicas have
    loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while replicas get weights

    async def run(self) -> None:
        """Follow the trainer until cancelled.

        Raises:
            WeightsError: ``weights.version`` when the trainer has gone back, else as a synchronisation.
            DeadlineExceeded: names a replica.
        """
        number, queue = 0, self.role.queue
        while True:
            try:
                notice = await queue.wait_notice(_TOPIC, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # a task that needs newer weights has a deadline of its own
            number, published = notice.number, structure(SyncReport, notice.value, _TOPIC, WeightsError)
            try:
                async with self.role.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                with suppress(DeadlineExceeded):
                    await queue.wait_notice(_TOPIC, number, 0.0)
                    continue  # newer ones are there, and these may have been removed
                raise
            await self.role.version.advance(published.version)

    async def load_all(self, published: SyncReport) -> None:
        """Load published weights into all replicas.

        Raises:
            WeightsError: as :meth:`run`.
        """
        async with self.loading:
            if published.version < self.newest.version:
                raise WeightsError(
                    "the trainer went back to earlier weights, which replicas do not take",
                    code="weights.version",
                    expected=f"at least {self.newest.version}",
                    found=published.version,
                    fix="start this explorer again",
                )
            if published != self.newest:  # a trainer that was restored may make a version again
                await asyncio.gather(*(self.load(replica, published) for replica in list(self.replicas)))
            self.newest = published

    async def load(self, replica: Replica, published: SyncReport | None = None) -> None:
        """Load published weights, or the newest ones, into one replica, while :attr:`loading` is held."""
        published = published or self.newest
        if published.retained is None:
            return  # it has those of the model's folder
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
        who = f"replica {replica.info.replica} to take weights {published.version}"
        receipt = await self.role.clock.wait_for(replica.server.update_weights(request), seconds, who)
        verify(replica.info, receipt, published.version, published.digests)
