"""Broken schedules, leases and loops are found by the invariants of a simulation within a few seeds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import RunError
from jackfield.queue.groups import Groups
from jackfield.queue.leases import Leases
from jackfield.queue.records import BatchState
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.simulation import check_seeds
from jackfield.trainer.checkpoint import Checkpointer
from jackfield.trainer.role import Schedule
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.steps import StepSource
from jackfield.trainer.trainer import Trainer
from jackfield_random_runs import random_settings

pytest.importorskip("torch")
SEEDS = 60

Patch = pytest.MonkeyPatch


def gate_is_off_by_one(patch: Patch) -> None:
    may_start = Schedule.may_start
    patch.setattr(Schedule, "may_start", lambda self, batch, version: may_start(self, batch - 1, version))
    patch.setattr(Schedule, "check", lambda self, step, oldest: 0)


def an_ack_counts_twice(patch: Patch) -> None:
    ack = TransferQueue.ack

    async def twice(self: Any, meta: Any, step: Any = None) -> None:
        self._core.record("ack", consumer=meta.leases[0].consumer, step=step, epoch=0, keys=meta.keys)
        await ack(self, meta, step)

    patch.setattr(TransferQueue, "ack", twice)


def a_dropped_group_is_not_retried(patch: Patch) -> None:
    patch.setattr(Groups, "_vacate", lambda self, group: None)


def a_lease_takes_an_incomplete_batch(patch: Patch) -> None:
    unused = Leases._unused

    def early(self: Any, consumer: Any, batch: int) -> Any:
        found = consumer.partition.batches.get(batch)
        fresh = [] if found is None else [group for group in found.groups if consumer.is_fresh(group)]
        return fresh or unused(self, consumer, batch)

    patch.setattr(Leases, "_unused", early)


def a_lease_ignores_staleness(patch: Patch) -> None:
    async def any_groups(self: Any, step: Any) -> Any:
        groups, seconds = self.role.config.data.groups_per_batch, self.role.config.deadlines.batch
        return await self.role.queue.lease("trainer", groups, step=step.number, deadline_seconds=seconds)

    patch.setattr(StepSource, "_lease_any", any_groups)
    patch.setattr(Schedule, "check", lambda self, step, oldest: 0)


def the_ack_comes_before_the_update(patch: Patch) -> None:
    advantages = Trainer.advantages

    async def early(self: Any, step: Any) -> None:
        await self.role.queue.ack(step.part, step=step.number)
        await advantages(self, step)

    patch.setattr(Trainer, "advantages", early)


def an_ended_lease_is_still_good(patch: Patch) -> None:
    held = Leases.held

    def lenient(self: Any, meta: Any, *, whole: bool = True) -> Any:
        try:
            return held(self, meta, whole=whole)
        except Exception:
            groups = [self.core.state.group(name) for name in dict.fromkeys(meta.groups)]
            lease = meta.leases[0]
            consumer = self.core.state.consumer(lease.consumer)
            return {(consumer, lease.epoch): [group for group in groups if group is not None]}

    patch.setattr(Leases, "held", lenient)


def a_resume_keeps_later_acks(patch: Patch) -> None:
    patch.setattr(Leases, "take_back", lambda self, step: None)


def a_resume_skips_a_step(patch: Patch) -> None:
    load = Checkpointer.load

    async def skip(self: Any, checkpoint: Any) -> Any:
        found = await load(self, checkpoint)
        self.role.steps_done.value = checkpoint.step
        object.__setattr__(checkpoint, "step", checkpoint.step + 1)
        return found

    patch.setattr(Checkpointer, "load", skip)


def completed_updates_are_made_again(patch: Patch) -> None:
    open_updates = Trainer._open_updates

    def every(self: Any, role: str, step: Any) -> Any:
        done, step.updates = step.updates, {}
        try:
            yield from [*open_updates(self, role, step)]
        finally:
            step.updates |= done

    patch.setattr(Trainer, "_open_updates", every)


def samples_of_dead_workers_stay(patch: Patch) -> None:
    async def nothing(self: Any) -> int:
        return 0

    patch.setattr(TransferQueue, "flush", nothing)


def consumed_samples_stay(patch: Patch) -> None:
    patch.setattr(Leases, "_finish", lambda self, groups: [])


def batches_of_dead_explorers_are_lost(patch: Patch) -> None:
    async def nothing(self: Any, client: str) -> None:
        return

    patch.setattr(TransferQueue, "end_holder", nothing)


def a_rollout_counts_twice(patch: Patch) -> None:
    async def lenient(self: Any, reports: Any) -> tuple[str, ...]:
        for report in reports:
            group = self._core.state.group(report.group)
            if group is not None and not group.is_made:
                self._groups._end_rollout(group, report)
        return await end_rollouts(self, reports)

    end_rollouts = TransferQueue.end_rollouts
    patch.setattr(TransferQueue, "end_rollouts", lenient)


def a_step_skips_the_publication(patch: Patch) -> None:
    syncs_after = Schedule.syncs_after
    patch.setattr(Schedule, "syncs_after", lambda self, step: step != 1 and syncs_after(self, step))
    patch.setattr(Schedule, "check", lambda self, step, oldest: 0)


def every_retry_is_the_last_one(patch: Patch) -> None:
    offer = BatchState.offer
    patch.setattr(BatchState, "offer", lambda self: None if any(g.retry for g in self.groups) else offer(self))
    groups_to_fill = Explorer._make_groups

    async def once(self: Any, keys: Any) -> None:
        await groups_to_fill(self, [key for key in keys if not key.retry])

    patch.setattr(Explorer, "_make_groups", once)


MUTANTS = [
    gate_is_off_by_one,
    an_ack_counts_twice,
    a_dropped_group_is_not_retried,
    a_lease_takes_an_incomplete_batch,
    a_lease_ignores_staleness,
    the_ack_comes_before_the_update,
    an_ended_lease_is_still_good,
    a_resume_keeps_later_acks,
    a_resume_skips_a_step,
    completed_updates_are_made_again,
    samples_of_dead_workers_stay,
    consumed_samples_stay,
    batches_of_dead_explorers_are_lost,
    a_rollout_counts_twice,
    a_step_skips_the_publication,
    every_retry_is_the_last_one,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_is_found(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(RunError) as caught:
        check_seeds(range(SEEDS), random_settings)
    assert "run.simulation" == caught.value.code
