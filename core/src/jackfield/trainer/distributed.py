"""A trainer, explorers and rewards in processes of their own: what they publish through the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from jackfield.abc.rollout import UpdateWeightsRequest
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.queue import TransferQueue
from jackfield.settings import structure
from jackfield.trainer.role import Role
from jackfield.trainer.schedule import Progress
from jackfield.weights import Replica, SyncReport, WeightSynchronizer, verify

_TOPIC, _FINISHED = "weights", "finished"


async def trainer_begun(queue: TransferQueue, seconds: float) -> None:
    """Wait until the trainer has begun: from then on the queue stays the one that it is.

    Raises:
        DeadlineExceeded: names the trainer.
    """
    with _named("the trainer to begin", seconds):
        await queue.wait_notice(_TOPIC, 0, seconds)


async def publish_end(queue: TransferQueue, steps: int) -> None:
    """Publish that all steps are done."""
    await queue.post(_FINISHED, {"steps": steps})


async def trainer_finished(queue: TransferQueue, done: Callable[[], int], seconds: float) -> None:
    """Wait until the trainer has done its last step.

    Args:
        queue: The queue of the run.
        done: How much work there was; while it grows, the wait goes on.
        seconds: The longest time without either.

    Raises:
        DeadlineExceeded: names the trainer and the explorers.
    """
    while True:
        before = done()
        try:
            with _named("the trainer to finish, or the explorers to bring a group", seconds):
                await queue.wait_notice(_FINISHED, 0, seconds)
        except DeadlineExceeded:
            if done() == before:
                raise
        else:
            return


@contextmanager
def _named(who: str, seconds: float) -> Iterator[None]:
    try:
        yield
    except DeadlineExceeded as error:
        fix = "look at whether that process lives, or raise the deadlines"
        raise DeadlineExceeded(f"waited {seconds:g} s for {who}", fix=fix) from error


@attrs.frozen(kw_only=True)
class PublishedWeights:
    """What a trainer publishes about its newest weights: plain values."""

    version: int
    kind: str = "full"
    connect: Mapping[str, Any] | None = None  #: of any worker; None: they are those of the model's folder
    digests: Mapping[str, str] = attrs.field(factory=dict)
    peft_config: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, version: int, report: SyncReport | None) -> PublishedWeights:
        """Describe the newest version by the synchronisation that brought it; None: there was none.

        Raises:
            WeightsError: ``weights.transfer``: the checkpoint engine keeps nothing for workers that come later.
        """
        if report is None:
            return cls(version=version)
        if report.retained is None or report.kind == "delta":
            raise WeightsError(
                "the checkpoint engine keeps no weights for explorers that come and go",
                where="checkpoint_engine",
                expected="one with the capability 'retains_weights' (file)",
                fix="choose checkpoint_engine: {name: file, folder: …}",
            )
        return cls(
            version=version,
            kind=report.kind,
            connect=report.retained,
            digests=report.digests,
            peft_config=report.peft_config,
        )


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
        """Raise the number, and publish it with how to get these weights."""
        await super().advance(value)
        await self._queue.post(_TOPIC, attrs.asdict(PublishedWeights.of(value, self._weights.last)))


@attrs.define(kw_only=True, eq=False)
class WeightSubscriber:
    """Loads each published version into this process's replicas, then lets the explorer go on.

    Receipts prove what the replicas have loaded.
    """

    role: Role
    replicas: Sequence[Replica]  #: the live list of them
    newest: PublishedWeights | None = attrs.field(default=None, init=False)  #: that all replicas have
    loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)  #: held while replicas get weights
    _begun: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def first(self, seconds: float) -> None:
        """Wait until the replicas have the trainer's weights.

        Raises:
            DeadlineExceeded: names the trainer.
        """
        await self.role.clock.wait_for(self._begun.wait(), seconds, "the trainer to say which weights it has")

    async def run(self) -> None:
        """Follow the trainer until cancelled.

        Raises:
            WeightsError: ``weights.version`` when the trainer has gone back, else as a synchronisation.
            DeadlineExceeded: names a replica.
        """
        number = 0
        while True:
            try:
                notice = await self.role.queue.wait_notice(_TOPIC, number, self.role.config.deadlines.batch)
            except DeadlineExceeded:
                continue  # a task that needs newer weights has a deadline of its own
            number = notice.number
            published = structure(PublishedWeights, notice.value, _TOPIC, WeightsError)
            try:
                async with self.role.stages.measure("load_weights", "weights", published.version):
                    await self.load_all(published)
            except WeightsError:
                if not await self._is_old(number):
                    raise
                continue  # newer ones are there, and these may have been removed
            await self.role.version.advance(published.version)
            self._begun.set()

    async def _is_old(self, number: int) -> bool:
        try:
            await self.role.queue.wait_notice(_TOPIC, number, 0.0)
        except DeadlineExceeded:
            return False
        return True

    async def load_all(self, published: PublishedWeights) -> None:
        """Load published weights into all replicas.

        Raises:
            WeightsError: as :meth:`run`.
        """
        async with self.loading:
            before = -1 if self.newest is None else self.newest.version
            if published.version < before:
                raise WeightsError(
                    "the trainer went back to earlier weights, which replicas do not take",
                    code="weights.version",
                    expected=f"at least {before}",
                    found=published.version,
                    fix="start this explorer again",
                )
            if published != self.newest:  # a trainer that was restored may make a version again
                await asyncio.gather(*(self._load(replica, published) for replica in list(self.replicas)))
            self.newest = published

    async def load(self, replica: Replica) -> None:
        """Load the newest weights into one replica, while the caller holds :attr:`loading`."""
        if self.newest is not None:
            await self._load(replica, self.newest)

    async def _load(self, replica: Replica, published: PublishedWeights) -> None:
        if published.connect is None:
            return  # it has those of the model's folder
        engine, seconds = self.role.config.checkpoint_engine, self.role.config.deadlines.sync
        request = UpdateWeightsRequest(
            version=published.version,
            checkpoint_engine=engine.name,
            checkpoint_engine_config=engine.settings,
            connect=(published.connect,) * replica.info.workers,
            first_worker=0,
            total_workers=replica.info.workers,
            kind="full" if published.peft_config is None else "adapter",
            peft_config=published.peft_config,
            deadline_seconds=seconds,
        )
        who = f"replica {replica.info.replica} to take weights {published.version}"
        receipt = await self.role.clock.wait_for(replica.server.update_weights(request), seconds, who)
        verify(replica.info, receipt, published.version, published.digests)
