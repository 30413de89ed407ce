"""The batch of each step: the step's own groups, used groups again, and groups of other partitions."""

from __future__ import annotations

import asyncio
from fractions import Fraction
from math import floor
from typing import Any

import attrs

from jackfield.config.sections import MixConfig, ReplayConfig
from jackfield.errors import JackfieldError
from jackfield.queue import BatchMeta, Reuse
from jackfield.runtime.samples import TRAIN, oldest_version
from jackfield.runtime.workers import is_lost, lost_keys
from jackfield.trainer.role import Role

CONSUMER = "trainer"


def further_groups(ratio: float, step: int, own: int) -> int:
    """Count what is mixed into a batch of ``own`` groups: the ratio holds over all steps, as nearly as it can."""
    each = own * Fraction(str(ratio))
    return floor((step + 1) * each) - floor(step * each)


def _consumer(partition: str) -> str:
    return CONSUMER if partition == TRAIN else f"{CONSUMER}/{partition}"


@attrs.define(kw_only=True, eq=False)
class BatchSource:
    """Leases the samples of each step from the queue."""

    role: Role
    stop: asyncio.Event = attrs.field(factory=asyncio.Event)  #: set when the run has to end at the next boundary
    #: by partition: what a batch has beside the step's own groups; in the trainer's own, groups that it has used
    mixed: dict[str, ReplayConfig | MixConfig] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Read what is mixed in."""
        named = attrs.asdict(self.role.config.mixing, recurse=False)
        self.mixed = {TRAIN if name == "replay" else name: each for name, each in named.items() if each is not None}

    async def register(self) -> None:
        """Register the trainer as a consumer, before any sample is put."""
        generated = ("rollout_log_probs", "reward") if self.role.explores else ()
        columns = ("prompt_ids", "response_ids", "response_mask", *generated)
        register = self.role.queue.register_consumer
        await register(CONSUMER, TRAIN, columns)
        for partition, each in self.mixed.items():
            reuse = Reuse(**{field.name: getattr(each, field.name) for field in attrs.fields(Reuse)})
            await register(_consumer(partition), partition, columns, sampler=each.sampler, reuse=reuse)

    async def next(self, step: int, *, may_stop: bool) -> BatchMeta | None:
        """Lease the batch of a step (from 0); None when the run has to stop before it.

        With ``may_stop`` it stops there, if that is a step before which a checkpoint can be cut.

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
        mixed, own = [], len(set(batch.groups))
        for partition, each in self.mixed.items():
            if groups := further_groups(each.ratio, step, own):
                which: dict[str, Any] = {"step": step, "fresh": partition != TRAIN, "deadline_seconds": seconds}
                mixed.append(await queue.lease_groups(_consumer(partition), groups, **which))
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
        """Fail the lost samples that an error names; return whether the batch had some, and was released."""
        if not is_lost(error) or not set(await self.role.queue.fail_lost(batch, lost_keys(error))) & set(batch.keys):
            return False
        await self.role.queue.release(batch)
        return True
