"""The training loop: one loop for every schedule and every algorithm."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import attrs

from jackfield.algorithms import VALUE_LOSS, KLController, LossSpec
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.cluster.device import DeviceLease
from jackfield.errors import QueueError, RunError
from jackfield.plugins.hooks import WeightsSynced
from jackfield.queue import BatchMeta
from jackfield.runtime.engine_group import EngineGroup
from jackfield.runtime.samples import global_counts, mini_batches, own, trained
from jackfield.trainer.batches import BatchSource
from jackfield.trainer.checkpoint import Checkpointer
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.report import StepReport
from jackfield.trainer.role import Role
from jackfield.trainer.schedule import Schedule
from jackfield.trainer.stages import Stages
from jackfield.weights import SyncReport

_SHARED = ("aggregation", "length_norm")  #: options of the policy's loss that are the critic's, too


class WeightPublisher(Protocol):
    """Brings the engine's weights to the replicas."""

    async def sync(self, version: int) -> SyncReport:
        """Publish a version; every replica has acknowledged it when this returns."""


@attrs.define(kw_only=True, eq=False)
class Step:
    """One training step. It outlives a batch whose samples are lost and made again."""

    number: int
    started: float
    batch: BatchMeta = attrs.field(init=False)
    leased: bool = False  #: whether ``batch`` is held now
    metrics: dict[str, float] = attrs.field(factory=dict)
    updates: dict[tuple[str, int], Mapping[str, float]] = attrs.field(factory=dict)  #: by role and mini-batch
    trained: bool = False

    @property
    def rows(self) -> BatchMeta:
        """The samples that models are trained on."""
        return trained(self.batch)


@attrs.define(kw_only=True, eq=False)
class Trainer:
    """Trains on the batch of each step and publishes weights as the schedule says."""

    role: Role
    batches: BatchSource
    actor: EngineGroup
    critic: EngineGroup | None = None
    reference: EngineGroup | None = None  #: None: the algorithm needs no reference policy
    log_prob_check: LogProbCheck | None = None
    weights: WeightPublisher | None = None  #: None: there are no replicas
    evaluator: Evaluator | None = None
    checkpoints: Checkpointer | None = None
    placement: DeviceLease
    report: StepReport = attrs.field(init=False)
    kl: KLController = attrs.field(init=False)  #: of the KL to the reference, in the loss or in the reward
    updated: int = attrs.field(default=0, init=False)  #: steps that are in the engine's weights
    _published: int = attrs.field(default=0, init=False)  #: the weight version that the replicas serve

    def __attrs_post_init__(self) -> None:
        """Begin with the coefficient of the KL that is configured."""
        self.kl = self.role.config.algorithm.kl.controller()
        self.report = StepReport(role=self.role, mixes=bool(self.batches.sources))

    @property
    def algorithm(self) -> ResolvedAlgorithm:
        """Return the algorithm of the run."""
        return self.role.algorithm

    @property
    def schedule(self) -> Schedule:
        """Return the schedule of the run."""
        return self.role.schedule

    @property
    def stages(self) -> Stages:
        """Return what measures the stages of the run."""
        return self.role.stages

    async def begin(self, first_step: int = 0, restored: Mapping[str, Any] | None = None) -> None:
        """Evaluate the initial model, or bring restored weights to the replicas, before explorers start.

        Args:
            first_step: the step that comes first.
            restored: the trainer's own state of a checkpoint (the KL controller's coefficient); None: a new run.
        """
        self._published = self.updated = first_step
        if restored is None:
            await self.evaluate(0)
        else:
            self.kl.coefficient = restored["kl_coefficient"]
            if self.weights is not None:
                async with self.placement.hold("train"):
                    await self.weights.sync(first_step)
        await self.release_explorers(first_step)

    async def run(self, first_step: int = 0) -> int:
        """Train until the schedule ends or a stop is requested. Returns the number of completed steps."""
        for number in range(first_step, self.schedule.steps):
            step = Step(number=number, started=self.role.clock.time())
            while not step.trained:
                async with self.recover_lost_samples(step):
                    if not await self.next_batch(step):
                        return await self.checkpoint_before(step)
                    async with self.placement.hold("train"):
                        await self.reference_log_probs(step)
                        await self.old_log_probs(step)
                        await self.values(step)
                        await self.advantages(step)
                        await self.update_critic(step)
                        await self.update_actor(step)
                        await self.publish_weights(step)
            await self.acknowledge(step)
            await self.evaluate(number + 1)
            await self.checkpoint(number + 1)
            await self.release_explorers(number + 1)
        return self.schedule.steps

    @asynccontextmanager
    async def recover_lost_samples(self, step: Step) -> AsyncIterator[None]:
        """Give the batch back when samples of it are lost. Then the stages are repeated, but no update is."""
        try:
            yield
        except QueueError as error:
            if not step.leased or not await self.batches.give_back_lost(step.batch, error):
                raise
            step.leased = False
        else:
            step.trained = step.leased

    # -- the stages of a step, in order

    async def next_batch(self, step: Step) -> bool:
        """Lease the batch of the step. Returns False when the run has to stop before this step."""
        async with self.stages.measure("next_batch", "trainer", step.number):
            batch = await self.batches.next(step.number, may_stop=not step.updates)
        if batch is not None:
            step.batch, step.leased = batch, True
        return batch is not None

    async def reference_log_probs(self, step: Step) -> None:
        """Compute log-probs of the reference policy, where the algorithm has one."""
        if self.reference is not None:
            async with self.stages.measure("reference_log_probs", "trainer", step.number):
                await self.reference.compute_log_probs(step.rows, "ref_log_probs")

    async def old_log_probs(self, step: Step) -> None:
        """Compute log-probs of the policy before the update, unless the rollout's are used."""
        if self.algorithm.recompute_old_log_probs:
            async with self.stages.measure("old_log_probs", "trainer", step.number):
                await self.actor.compute_log_probs(step.rows, "old_log_probs")

    async def values(self, step: Step) -> None:
        """Compute the critic's values, where there is a critic."""
        if self.critic is not None:
            async with self.stages.measure("values", "trainer", step.number):
                await self.critic.compute_values(step.rows, "values")

    async def advantages(self, step: Step) -> None:
        """Turn rewards into advantages, unless the data's own answers are the target."""
        if self.algorithm.advantages is not None:
            async with self.stages.measure("advantages", "trainer", step.number):
                metrics, written = await self.role.workers.estimator.estimate(step.batch, self.kl.coefficient)
                await self.role.queue.add_columns(step.rows, written)
                step.metrics |= metrics

    async def update_critic(self, step: Step) -> None:
        """Do the critic's optimizer steps on the batch."""
        if self.critic is not None:
            async with self.stages.measure("update_critic", "trainer", step.number):
                for key, part in self._open_updates("critic", step):
                    step.updates[key] = await self._critic_step(self.critic, part, step.number)

    async def update_actor(self, step: Step) -> None:
        """Do the policy's optimizer steps on the batch, once the critic's warm-up is over."""
        async with self.stages.measure("update_actor", "trainer", step.number):
            if self.critic is None or step.number >= self.role.config.critic.warmup_steps:
                for key, part in self._open_updates("actor", step):
                    step.updates[key] = await self._actor_step(part, step.number, first=key == ("actor", 0))
        step.metrics |= _means(step.updates)
        self._observe_kl(step)
        self.updated = step.number + 1

    async def publish_weights(self, step: Step) -> None:
        """Bring the new weights to the replicas when the schedule or an evaluation asks for them."""
        evaluates = self.evaluator is not None and self.evaluator.is_due(step.number + 1)
        if self.weights is None or not (self.schedule.syncs_after(step.number) or evaluates):
            return
        version = step.number + 1
        async with self.stages.measure("publish_weights", "trainer", step.number):
            report = await self.weights.sync(version)
        event = WeightsSynced(
            version=version, receipts=report.receipts, seconds=report.seconds, sent_bytes=report.bytes
        )
        self.role.hooks.weights_synced(event=event)
        self._published = version

    async def acknowledge(self, step: Step) -> None:
        """Tell the queue that the batch is used, and the hooks what the step was like."""
        await self.batches.acknowledge(step.batch, step.number)
        await self.report.step_ended(step.number, step.batch, step.metrics, step.started)

    async def evaluate(self, steps_done: int) -> None:
        """Evaluate the weights that the replicas serve, when that is due."""
        if self.evaluator is not None and self.evaluator.is_due(steps_done):
            await self.evaluator.evaluate(self._published)

    async def checkpoint(self, steps_done: int) -> None:
        """Write a checkpoint when one is due; acks of the steps before it are final."""
        if self.checkpoints is None or not self.role.config.checkpoint.every:
            await self.batches.commit(steps_done - 1)  # no run goes on from here: there is nothing to wait for
        if self.checkpoints is not None and self.checkpoints.is_due(steps_done):
            await self.checkpoints.save(steps_done, self._state())

    async def checkpoint_before(self, step: Step) -> int:
        """Write a checkpoint of the state before a step. Returns the number of completed steps.

        Without an offset, explorers did nothing when the last step ended: its batch is made again by a resumed run.
        """
        if self.checkpoints is not None and step.number > self.checkpoints.saved:
            again_from = None if self.schedule.sync_offset else step.number
            await self.checkpoints.save(step.number, self._state(), again_from=again_from)
        return step.number

    async def release_explorers(self, steps_done: int) -> None:
        """Let explorers go on. It comes last, so that without an offset nothing is in flight at a checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.note_random_state()
        await self.role.version.advance(self._published)
        await self.role.steps_done.advance(steps_done)

    # -- one optimizer step

    def _open_updates(self, role: str, step: Step) -> list[tuple[tuple[str, int], BatchMeta]]:
        """The mini-batches of all epochs, less those that were done before samples of the batch were lost."""
        settings = self.role.config.algorithm
        parts = mini_batches(step.rows, settings.mini_batches, whole_groups=self.algorithm.whole_groups)
        parts *= settings.epochs
        return [((role, index), part) for index, part in enumerate(parts) if (role, index) not in step.updates]

    async def _actor_step(self, part: BatchMeta, step: int, *, first: bool) -> Mapping[str, float]:
        check = self.log_prob_check if first else None  # before the weights change
        comparison = None
        if check is not None and check.is_due(step):
            engine = "old_log_probs" if self.algorithm.recompute_old_log_probs else "log_probs"
            comparison = check.comparison(engine, self.updated)
        if self.algorithm.prepares or (comparison is not None and comparison.engine == "log_probs"):
            await self.actor.compute_log_probs(part, "log_probs")
        if self.algorithm.prepares:
            await self.role.queue.add_columns(part, await self.role.workers.estimator.prepare(part))
        options = dict(self.algorithm.loss_options)
        if "kl" in options:
            options["kl_coefficient"] = self.kl.coefficient
        loss = LossSpec(name=self.algorithm.loss, options=options, global_counts=global_counts(part.tags))
        update = await self.actor.update(part, loss, comparison)
        if check is not None and comparison is not None:
            update = check.judge(update, part, step, self.updated)
        _require_finite(update, ("policy/loss", "grad_norm"), step)
        return update

    async def _critic_step(self, critic: EngineGroup, part: BatchMeta, step: int) -> Mapping[str, float]:
        mine = own(part)
        taken = {name: self.algorithm.loss_options[name] for name in _SHARED if name in self.algorithm.loss_options}
        options = {"clip": self.role.config.critic.clip, **taken}
        loss = LossSpec(name=VALUE_LOSS, options=options, global_counts=global_counts(mine.tags))
        update = await critic.update(mine, loss)
        _require_finite(update, ("value/loss", "grad_norm"), step)
        return {name if "/" in name else f"critic/{name}": value for name, value in update.items()}

    def _observe_kl(self, step: Step) -> None:
        """Steer the coefficient of the KL penalty by what was measured."""
        if "policy/kl" in step.metrics:
            step.metrics["policy/kl_coefficient"] = self.kl.coefficient
            self.kl.update(step.metrics["policy/kl"], len(step.rows))
        if self.algorithm.kl_in_reward:
            self.kl.update(step.metrics["reward/kl"], len(step.rows))

    def _state(self) -> dict[str, float]:
        """The trainer's own state in a checkpoint."""
        return {"kl_coefficient": self.kl.coefficient}


def _means(updates: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[str, float]:
    """Each metric's mean over the updates of its role."""
    means: dict[str, float] = {}
    for role in ("critic", "actor"):
        of_role = [metrics for (each, _), metrics in updates.items() if each == role]
        for name in of_role[0] if of_role else ():
            means[name] = sum(metrics[name] for metrics in of_role) / len(of_role)
    return means


def _require_finite(update: Mapping[str, float], names: Sequence[str], step: int) -> None:
    for name in names:
        value = update[name]
        if value - value != 0:
            raise RunError(
                f"{name} is {value}",
                code="run.not-finite",
                where=f"step {step + 1}",
                expected="a finite number",
                found=value,
                fix="lower optimizer.lr or optimizer.clip_grad, or look at the rewards; the step was not applied",
            )
