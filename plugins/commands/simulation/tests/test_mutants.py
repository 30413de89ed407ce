"""Broken schedules, leases and loops are found by the invariants of a simulation within a few seeds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import pytest

from jackfield import weights
from jackfield.cluster.pool import ReplicaPool
from jackfield.errors import DeadlineExceeded, RunError
from jackfield.queue.groups import Groups
from jackfield.queue.leases import Leases
from jackfield.queue.records import BatchState
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.routing import Router
from jackfield.runtime import agent_worker
from jackfield.sdk.rpc import Connection
from jackfield.sdk.rpc.wire import Reply
from jackfield.simulation import SimulationSettings, Times, check_seeds
from jackfield.trainer.checkpoint import Checkpointer
from jackfield.trainer.role import Progress, Schedule
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.steps import StepSource
from jackfield.trainer.trainer import Trainer
from jackfield.trainer.weights import EngineWeights
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


def all_replicas_are_updated_at_once(patch: Patch) -> None:
    async def at_once(self: Any, version: int, send: Any) -> Any:
        return await self._send(self.members[:], partial(send, version, last=True))

    patch.setattr(ReplicaPool, "sync", at_once)


def requests_go_to_replicas_that_are_updated(patch: Patch) -> None:
    route = Router.route
    patch.setattr(Router, "route", lambda self, replicas, seconds, updating=(): route(self, replicas, seconds))


def a_continued_request_has_its_whole_budget(patch: Patch) -> None:
    generate = Router._generate

    async def whole(self: Any, replica: Any, request: Any) -> Any:
        sampling = attrs.evolve(request.sampling, max_new_tokens=4)
        return await generate(self, replica, attrs.evolve(request, sampling=sampling))

    patch.setattr(Router, "_generate", whole)


def a_continued_request_loses_its_first_part(patch: Patch) -> None:
    patch.setattr(Router, "_joined", lambda self, request, done, part: part)


def training_does_not_interrupt_rollouts(patch: Patch) -> None:
    hand_over = EngineWeights.hand_over

    async def silent(self: Any, before: Any, role: str) -> None:
        self.interrupts = False
        await hand_over(self, before, role)

    patch.setattr(EngineWeights, "hand_over", silent)


def a_restarted_replica_gets_no_weights(patch: Patch) -> None:
    async def nothing(self: Any, replica: Any) -> None:
        return

    patch.setattr(EngineWeights, "load", nothing)
    patch.setattr(Schedule, "check", lambda self, step, oldest: 0)


def a_sample_has_its_newest_version(patch: Patch) -> None:
    tags = agent_worker.sequence_tags
    newest = lambda *found: {**(made := tags(*found)), "weight_version_min": made["weight_version_max"]}  # noqa: E731
    patch.setattr(agent_worker, "sequence_tags", newest)


def a_dead_replica_stays_dead(patch: Patch) -> None:
    patch.setattr(ReplicaPool, "_watch", lambda self, replica: None)


def a_broken_transfer_restarts_every_replica(patch: Patch) -> None:
    remove = ReplicaPool._remove_lost

    async def anyone(self: Any, replicas: Any, error: Any = None) -> bool:
        return await remove(self, [*self.replicas.values()] if error is None else replicas, error)

    patch.setattr(ReplicaPool, "_remove_lost", anyone)


def a_transfer_is_given_up_after_a_minute(patch: Patch) -> None:
    together = weights.run_together
    patch.setattr(weights, "run_together", lambda ends, clock, seconds, what: together(ends, clock, 60.0, what))


def a_second_reply_is_one_to_any_open_call(patch: Patch) -> None:
    handle = Connection.handle

    def lenient(self: Any, message: Any) -> None:
        if isinstance(message, Reply) and message.id not in self._asked:
            if not self._asked:
                return
            message.id = next(iter(self._asked))
        handle(self, message)

    patch.setattr(Connection, "handle", lenient)


def explorers_are_impatient_with_the_trainer(patch: Patch) -> None:
    until = Progress.until

    async def impatient(self: Any, enough: Any, seconds: float, waiting_for: str) -> Any:
        gate = waiting_for.startswith("the trainer, by explorer")
        try:
            return await until(self, enough, min(seconds, 60.0) if gate else seconds, waiting_for)
        except DeadlineExceeded:
            if not gate:
                raise

    patch.setattr(Progress, "until", impatient)
    patch.setattr(Schedule, "check", lambda self, step, oldest: 0)


def reports_to_a_silent_controller_are_dropped(patch: Patch) -> None:
    async def ended(self: Any, reports: Any) -> None:
        async with asyncio.timeout(15.0):
            await told(self, reports)

    async def dropping(self: Any, reports: Any) -> None:
        try:
            await ended(self, reports)
        except TimeoutError:
            self._running -= len(reports)
            self._changed.set()

    told = Explorer._ended
    patch.setattr(Explorer, "_ended", dropping)


def the_trainer_gives_a_silent_explorer_up(patch: Patch) -> None:
    lease = TransferQueue.lease

    async def impatient(self: Any, consumer: str, *arguments: Any, **named: Any) -> Any:
        if consumer == "trainer":
            named["deadline_seconds"] = min(named["deadline_seconds"], 90.0)
        return await lease(self, consumer, *arguments, **named)

    patch.setattr(TransferQueue, "lease", impatient)


def with_faults(role: str, *kinds: str, **settings: Any) -> Callable[[int], SimulationSettings]:
    """Return random settings whose faults are those of a role."""

    def chosen(seed: int) -> SimulationSettings:
        drawn = random_settings(seed)
        faults = [
            attrs.evolve(each, role=role, kind=kinds[at % len(kinds)] if kinds else each.kind)
            for at, each in enumerate(drawn.faults)
        ]
        return attrs.evolve(drawn, faults=faults, **settings)

    return chosen


#: Mutants that faults of one role and kind have to find.
BY_FAULT: list[tuple[Callable[[Patch], None], Callable[[int], SimulationSettings]]] = [
    (a_lease_ignores_staleness, with_faults("agent worker", "answers late")),
    (a_resume_keeps_later_acks, with_faults("engine rank", "dies")),
    (a_dead_replica_stays_dead, with_faults("replica", "dies")),
    (a_dead_replica_stays_dead, with_faults("replica", "freezes")),
    (a_restarted_replica_gets_no_weights, with_faults("replica", "dies")),
    (a_broken_transfer_restarts_every_replica, with_faults("replica", "dies")),
    (a_transfer_is_given_up_after_a_minute, with_faults("replica", "answers late", times=Times())),
    (a_second_reply_is_one_to_any_open_call, with_faults("replica", "answers twice")),
    (explorers_are_impatient_with_the_trainer, with_faults("trainer", "answers late", distributed=True, times=Times())),
    (
        reports_to_a_silent_controller_are_dropped,
        with_faults("controller", "answers late", distributed=True, times=Times()),
    ),
    (the_trainer_gives_a_silent_explorer_up, with_faults("explorer", "answers late", distributed=True, times=Times())),
]


MUTANTS = [
    all_replicas_are_updated_at_once,
    requests_go_to_replicas_that_are_updated,
    a_continued_request_has_its_whole_budget,
    a_continued_request_loses_its_first_part,
    training_does_not_interrupt_rollouts,
    a_sample_has_its_newest_version,
    gate_is_off_by_one,
    an_ack_counts_twice,
    a_dropped_group_is_not_retried,
    a_lease_takes_an_incomplete_batch,
    the_ack_comes_before_the_update,
    an_ended_lease_is_still_good,
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
        check_seeds(range(SEEDS), random_settings, tries=1)
    assert "run.simulation" == caught.value.code


@pytest.mark.parametrize(
    ("mutant", "settings"), BY_FAULT, ids=[f"{number}-{mutant.__name__}" for number, (mutant, _) in enumerate(BY_FAULT)]
)
def test_a_mutant_is_found_by_a_fault(
    mutant: Callable[[Patch], None], settings: Callable[[int], SimulationSettings], monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(RunError) as caught:
        check_seeds(range(SEEDS), settings, tries=1)
    assert "run.simulation" == caught.value.code
