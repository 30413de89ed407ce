"""The batch of each step: the step's own groups, and groups that are mixed in beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import attrs

from jackfield.errors import JackfieldError
from jackfield.queue import BatchMeta
from jackfield.runtime.samples import TRAIN, oldest_version
from jackfield.runtime.workers import is_lost, lost_keys
from jackfield.trainer.mixing import Source
from jackfield.trainer.role import Role

CONSUMER = "trainer"

_COLUMNS = ("prompt_ids", "response_ids", "response_mask")


@attrs.define(kw_only=True, eq=False)
class BatchSource:
    """Leases the samples of each step from the queue, and acknowledges them."""

    role: Role
    sources: tuple[Source, ...] = ()  #: of what a batch has beside the step's own groups
    stop: asyncio.Event = attrs.field(factory=asyncio.Event)  #: set when the run has to end at the next boundary

    async def register(self) -> None:
        """Register the trainer as a consumer, before any sample is put."""
        columns = (*_COLUMNS, *(("rollout_log_probs", "reward") if self.role.schedule.explores else ()))
        await self.role.queue.register_consumer(CONSUMER, partition=TRAIN, columns=columns)
        for source in self.sources:
            await source.register(self.role.queue, CONSUMER, columns)

    async def next(self, step: int, *, may_stop: bool) -> BatchMeta | None:
        """Lease the batch of a step.

        Args:
            step: its number, from 0.
            may_stop: whether the run may end before this step, at a step after which a checkpoint can be cut.

        Returns:
            the batch; None when the run has to stop.

        Raises:
            DeadlineExceeded: the batch was not complete in time.
            ScheduleError: ``schedule.staleness``.
        """
        leasing = self.role.queue.lease_batch(CONSUMER, step, deadline_seconds=self.role.config.deadlines.batch)
        if may_stop and not (self.role.schedule.explores and step % self.role.schedule.sync_interval):
            batch = await self._unless_stopped(leasing)
        else:
            batch = await leasing
        if batch is None:
            return None
        own = len(set(batch.groups))
        mixed = [
            await source.sample(self.role.queue, CONSUMER, step, own, self.role.config.deadlines.batch)
            for source in self.sources
        ]
        if self.role.schedule.explores:
            self.role.schedule.check(step, oldest_version(batch.tags))
        for more in filter(None, mixed):
            batch = batch.joined(more)
        return batch

    async def _unless_stopped(self, leasing: Coroutine[Any, Any, BatchMeta]) -> BatchMeta | None:
        """Wait for the lease or for the stop, whichever comes first."""
        lease, stopped = asyncio.ensure_future(leasing), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({lease, stopped}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            if self.stop.is_set() or not lease.done():
                lease.cancel()
                await asyncio.wait({lease})
        return None if self.stop.is_set() else lease.result()

    async def give_back_lost(self, batch: BatchMeta, error: JackfieldError) -> bool:
        """Fail the lost samples that an error names, and release the batch if some of its own are among them.

        Returns:
            whether the batch was released, and will be completed again.
        """
        if not is_lost(error) or not set(await self.role.queue.fail_lost(batch, lost_keys(error))) & set(batch.keys):
            return False
        await self.role.queue.release(batch)
        return True

    async def acknowledge(self, batch: BatchMeta, step: int) -> None:
        """Record that a step has used the batch. It is final once :meth:`commit` names that step."""
        await self.role.queue.ack(batch, step=step)

    async def commit(self, step: int) -> None:
        """Make the acks of all steps up to ``step`` final."""
        await self.role.queue.commit(step)
