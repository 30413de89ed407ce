"""A trainer, explorers and rewards in processes of their own: what they tell each other through the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, WeightsError
from jackfield.queue import TransferQueue
from jackfield.settings import structure
from jackfield.trainer.schedule import Progress
from jackfield.trainer.stages import Stages
from jackfield.weights import Posted, WeightFollower, WeightSynchronizer

__all__ = ["FollowedVersion", "PostedVersion", "post_finished", "trainer_begun", "trainer_finished"]

_TOPIC, _FINISHED = "weights", "finished"


async def trainer_begun(queue: TransferQueue, seconds: float) -> None:
    """Return when the trainer has begun: from then on the queue stays the one that it is.

    Raises:
        DeadlineExceeded: naming the trainer.
    """
    with _named("the trainer to begin", seconds):
        await queue.wait_notice(_TOPIC, 0, seconds)


async def post_finished(queue: TransferQueue, steps: int) -> None:
    """Tell everybody that all steps are done."""
    await queue.post(_FINISHED, {"steps": steps})


async def trainer_finished(queue: TransferQueue, done: Callable[[], int], seconds: float) -> None:
    """Return when the trainer has done its last step.

    Args:
        queue: of the run.
        done: how much work there was; while it grows, nobody is waited for in vain.
        seconds: the longest without either.

    Raises:
        DeadlineExceeded: naming the trainer and the explorers.
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


class PostedVersion(Progress):
    """The trainer's side: what explorers may go on with, told to those in other processes, too."""

    def __init__(self, clock: Clock, queue: TransferQueue, weights: WeightSynchronizer) -> None:
        """
        Args:
            clock: through which every wait goes.
            queue: where it is posted.
            weights: knows its newest synchronisation.
        """
        super().__init__(clock)
        self._queue = queue
        self._weights = weights

    async def advance(self, value: int) -> None:
        """Raise the number, and post it with how to get these weights."""
        await super().advance(value)
        await self._queue.post(_TOPIC, attrs.asdict(Posted.of(value, self._weights.last)))


@attrs.frozen(kw_only=True)
class FollowedVersion:
    """The explorers' side: brings each posted version to this process's replicas, then lets the explorer go on."""

    queue: TransferQueue
    follower: WeightFollower
    version: Progress  #: of the weights that the replicas serve
    clock: Clock
    stages: Stages
    idle_seconds: float  #: after which a wait is begun anew
    _begun: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    async def first(self, seconds: float) -> None:
        """Return when the replicas have the trainer's weights.

        Raises:
            DeadlineExceeded: naming the trainer.
        """
        await self.clock.wait_for(self._begun.wait(), seconds, "the trainer to say which weights it has")

    async def run(self) -> None:
        """Follow until cancelled.

        Raises:
            WeightsError: see :meth:`~jackfield.weights.WeightFollower.load`.
        """
        number = 0
        while True:
            try:
                notice = await self.queue.wait_notice(_TOPIC, number, self.idle_seconds)
            except DeadlineExceeded:
                continue  # who needs newer weights has a deadline of its own
            number = notice.number
            posted = structure(Posted, notice.value, _TOPIC, WeightsError)
            try:
                async with self.stages.measure("load_weights", "weights", posted.version):
                    await self.follower.load(posted)
            except WeightsError:
                if not await self._is_old(number):
                    raise
                continue  # newer ones are there, and these may have been removed
            await self.version.advance(posted.version)
            self._begun.set()

    async def _is_old(self, number: int) -> bool:
        try:
            await self.queue.wait_notice(_TOPIC, number, 0.0)
        except DeadlineExceeded:
            return False
        return True
