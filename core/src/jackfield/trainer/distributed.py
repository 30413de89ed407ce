"""A trainer, explorers and rewards in processes of their own: what they publish through the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import attrs

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.settings import structure
from jackfield.trainer.role import Role
from jackfield.weights import Replica, SyncReport, verify

WEIGHTS, FINISHED = "weights", "finished"  #: topics of the queue: the newest weights, and the end of the last step

_NOTHING = SyncReport(version=-1, receipts=(), seconds=0.0, paused_seconds=0.0, bytes=0)


async def noticed(role: Role, topic: str, seconds: float, who: str) -> None:
    """Wait until another role has posted something under a topic; ``who`` is named when it comes too late."""
    await role.clock.wait_for(role.queue.wait_notice(topic, 0, 2 * seconds), seconds, who)


async def publish(role: Role, report: SyncReport | None, version: int) -> None:
    """Publish how explorers in other processes get the trainer's weights of ``version``.

    ``report`` is of the newest synchronisation; None: they are those of the model's folder.

    Raises:
        WeightsError: ``weights.transfer``: the checkpoint engine keeps nothing for workers that come later.
    """
    if report is not None and (report.retained is None or report.kind == "delta"):
        raise WeightsError(
            "the checkpoint engine keeps no weights for explorers that come and go",
            where="checkpoint_engine",
            expected="one with the capability 'retains_weights' (file)",
            fix="choose checkpoint_engine: {name: file, folder: …}",
        )
    await role.queue.post(WEIGHTS, attrs.asdict(attrs.evolve(report or _NOTHING, version=version, receipts=())))


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
                notice = await queue.wait_notice(WEIGHTS, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # a task that needs newer weights has a deadline of its own
            number, published = notice.number, structure(SyncReport, notice.value, WEIGHTS, WeightsError)
            try:
                async with self.role.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                with suppress(DeadlineExceeded):
                    await queue.wait_notice(WEIGHTS, number, 0.0)
                    continue  # newer ones are there, and these may have been removed
                raise
            await self.role.version.advance(published.version)

    async def load_all(self, published: SyncReport) -> None:
        """Load published weights into all replicas; errors are those of :meth:`run`."""
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
