"""The batch of each step: the step's own groups, used groups again, and groups of other partitions."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from math import floor
from typing import Any

import attrs

from jackfield.errors import JackfieldError
from jackfield.queue import BatchMeta, Reuse, SamplerSpec
from jackfield.runtime.samples import TRAIN, oldest_version
from jackfield.runtime.workers import is_lost, lost_keys
from jackfield.trainer.role import Role

CONSUMER = "trainer"

_COLUMNS = ("prompt_ids", "response_ids", "response_mask")


@attrs.frozen(kw_only=True)
class Source:
    """Where further groups of a batch are from, how many and which."""

    partition: str  #: the trainer's own: groups that it has trained on before
    ratio: float  #: groups for each group of the batch
    sampler: SamplerSpec
    reuse: Reuse

    @property
    def consumer(self) -> str:
        """Return the name under which the trainer leases these groups."""
        return CONSUMER if self.partition == TRAIN else f"{CONSUMER}/{self.partition}"

    def groups(self, step: int, own: int) -> int:
        """Count the groups of a step whose batch has ``own``: the ratio holds over all steps, as nearly as it can."""
        each = own * Fraction(str(self.ratio))
        return floor((step + 1) * each) - floor(step * each)


@attrs.define(kw_only=True, eq=False)
class BatchSource:
    """Leases the samples of each step from the queue."""

    role: Role
    sources: tuple[Source, ...] = ()  #: of what a batch has beside the step's own groups
    stop: asyncio.Event = attrs.field(factory=asyncio.Event)  #: set when the run has to end at the next boundary

    async def register(self) -> None:
        """Register the trainer as a consumer, before any sample is put."""
        columns = (*_COLUMNS, *(("rollout_log_probs", "reward") if self.role.explores else ()))
        queue = self.role.queue
        await queue.register_consumer(CONSUMER, TRAIN, columns)
        for each in self.sources:
            partition, sampler, reuse = each.partition, each.sampler, each.reuse
            await queue.register_consumer(each.consumer, partition, columns, sampler=sampler, reuse=reuse)

    async def next(self, step: int, *, may_stop: bool) -> BatchMeta | None:
        """Lease the batch of a step.

        Args:
            step: its number, from 0.
            may_stop: whether the run may end before this step, at a step after which a checkpoint can be cut.

        Returns:
            the batch; None when the run has to stop.

        Raises:
            DeadlineExceeded: the batch, or what is mixed in, was not complete in time.
            ScheduleError: ``schedule.staleness``.
        """
        queue, schedule, seconds = self.role.queue, self.role.schedule, self.role.config.deadlines.batch
        leasing = asyncio.ensure_future(queue.lease_batch(CONSUMER, step, deadline_seconds=seconds))
        if may_stop and not (schedule.explores and step % schedule.sync_interval):
            await self._or_stop(leasing)
            if self.stop.is_set():
                return None
        batch = await leasing
        mixed = []
        for each in self.sources:
            if groups := each.groups(step, len(set(batch.groups))):
                fresh = each.partition != TRAIN
                leased = queue.lease_groups(each.consumer, groups, step=step, fresh=fresh, deadline_seconds=seconds)
                mixed.append(await leased)
        if schedule.explores:
            schedule.check(step, oldest_version(batch.tags))
        for more in filter(None, mixed):
            batch = batch.joined(more)
        return batch

    async def _or_stop(self, leasing: asyncio.Future[Any]) -> None:
        """Wait for the lease or for the stop, whichever comes first; after a stop, the lease is cancelled."""
        stopped: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({leasing, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if self.stop.is_set() or not leasing.done():
                leasing.cancel()
                await asyncio.wait({leasing})

    async def give_back_lost(self, batch: BatchMeta, error: JackfieldError) -> bool:
        """Fail the lost samples that an error names, and release the batch if some of its own are among them.

        Returns:
            whether the batch was released, and will be completed again.
        """
        if not is_lost(error) or not set(await self.role.queue.fail_lost(batch, lost_keys(error))) & set(batch.keys):
            return False
        await self.role.queue.release(batch)
        return True
