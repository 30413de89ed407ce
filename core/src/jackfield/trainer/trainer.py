"""The training loop: one loop for every schedule and every algorithm."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import attrs

from jackfield.abc.engine import LossSpec
from jackfield.algorithms import VALUE_LOSS, Algorithm, KLController
from jackfield.clock import Clock
from jackfield.errors import QueueError, RunError
from jackfield.plugins.hooks import SampleRecord, SamplesFailed, SamplesRecorded, StepEnded, WeightsSynced
from jackfield.queue import BatchMeta, TransferQueue
from jackfield.runtime.agent_worker import AgentWorker
from jackfield.runtime.log_probs import Comparison
from jackfield.runtime.samples import TRAIN, global_counts, is_expert, mini_batches, said_metrics, trained
from jackfield.runtime.workers import Workers, is_lost, lost_keys, resubmitted, suppress_lost
from jackfield.trainer.checkpoint import Checkpointer
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.log_prob_check import LogProbCheck
from jackfield.trainer.mixing import Source
from jackfield.trainer.placement import PlacementLease
from jackfield.trainer.schedule import Progress, Schedule
from jackfield.trainer.stages import Stages
from jackfield.weights import SyncReport

__all__ = ["AdvantageEstimator", "Critic", "EngineGroup", "Trainer", "WeightPublisher"]

CONSUMER = "trainer"

#: Metrics of a step's updates, by role and number.
Updates: TypeAlias = dict[tuple[str, int], Mapping[str, float]]


class _Stopped(Exception):
    """The run is to end, and nothing of the next step has been done."""


class EngineGroup(Protocol):
    """The workers of one model, whatever their parallelism and wherever they live. They get metadata only."""

    async def compute_log_probs(self, batch: BatchMeta, column: str) -> None:
        """Write the model's log-probs of the responses into ``column``."""

    async def compute_values(self, batch: BatchMeta, column: str) -> None:
        """Write a critic's values of the responses into ``column``."""

    async def update(
        self, batch: BatchMeta, loss: LossSpec, comparison: Comparison | None = None
    ) -> Mapping[str, float]:
        """One optimizer step on ``batch``, and what a comparison of its log-probs finds."""

    async def save(self, folder: str, format: Literal["native", "huggingface"]) -> None:
        """Write a checkpoint into ``folder``, which all workers reach and which is empty or absent."""

    async def load(self, folder: str) -> None:
        """Read a native checkpoint, whatever number of workers wrote it."""


class WeightPublisher(Protocol):
    """Whoever brings the engine's weights to the replicas."""

    async def sync(self, version: int) -> SyncReport:
        """Publish a version; every replica has acknowledged it when this returns."""


class AdvantageEstimator(Protocol):
    """Whoever computes what the algorithm has to know of a whole batch. It gets metadata only."""

    async def estimate(self, batch: BatchMeta, kl_coefficient: float = 0.0) -> Mapping[str, float]:
        """Turn rewards into ``advantages`` and ``returns``; return their statistics."""

    async def prepare(self, batch: BatchMeta) -> None:
        """Write what the loss has to know of the rows of one optimizer step, whose log-probs are ``log_probs``."""


@attrs.frozen(kw_only=True)
class Critic:
    """A value model that is trained beside the actor."""

    engine: EngineGroup
    loss_options: Mapping[str, Any]
    warmup_steps: int = 0  #: first steps in which the actor waits


@attrs.define(kw_only=True, eq=False)
class Trainer:
    """Takes the batch of each step from the queue, trains on it, and publishes weights as the schedule says."""

    queue: TransferQueue
    schedule: Schedule
    algorithm: Algorithm
    loss_options: Mapping[str, Any]
    actor: EngineGroup
    estimator: AdvantageEstimator
    reference: EngineGroup | None  #: None: nobody asks for a reference policy
    recompute_old_log_probs: bool
    mini_batches: int
    epochs: int
    weights: WeightPublisher | None  #: None: nobody generates
    checkpoints: Checkpointer | None  #: None: never
    checkpoint_every: int  #: 0: not before the end, and a step is final when it is done
    checkpoint_at_end: bool
    evaluator: Evaluator | None
    evaluate_every: int
    explores: bool  #: whether an explorer waits for weights
    placement: PlacementLease
    version: Progress
    steps_done: Progress
    clock: Clock
    stages: Stages
    hooks: Any
    agents: Workers[AgentWorker]  #: show samples
    batch_seconds: float
    critic: Critic | None = None
    log_prob_check: LogProbCheck | None = None
    #: of the KL to the reference, in the loss or in the reward
    kl: KLController = attrs.field(factory=lambda: KLController(coefficient=0.0))
    kl_in_reward: bool = False
    prepares: bool = False  #: the loss has to know its whole batch before each optimizer step
    whole_groups: bool = False  #: mini-batches do not split groups
    sources: tuple[Source, ...] = ()  #: of what a batch has beside its ticket's groups
    stop: asyncio.Event = attrs.field(factory=asyncio.Event)  #: the run is to end at the next boundary
    recorded: int = 4  #: samples of a step that are shown in the table
    updated: int = attrs.field(default=0, init=False)  #: steps that are in the engine's weights
    _published: int = attrs.field(default=0, init=False)  #: the weight version that the replicas serve
    _saved: int = attrs.field(default=0, init=False)  #: steps in the newest checkpoint

    async def register(self) -> None:
        """Announce the consumer to the queue, before any row is put."""
        columns = ("prompt_ids", "response_ids", "response_mask")
        needed = ("rollout_log_probs", "reward") if self.explores else ()
        await self.queue.register_consumer(CONSUMER, partition=TRAIN, columns=(*columns, *needed))
        for source in self.sources:
            await source.register(self.queue, CONSUMER, (*columns, *needed))

    async def begin(self, first_step: int = 0, restored: Mapping[str, Any] | None = None) -> None:
        """Before anybody explores: evaluate the initial model, or bring restored weights to the replicas.

        Args:
            first_step: that will be done.
            restored: the trainer's own state of a checkpoint (the KL controller's coefficient); None: a new run.
        """
        self._published = self.updated = self._saved = first_step
        if restored is None:
            await self._evaluate_if_due(0)
        else:
            self.kl.coefficient = restored["kl_coefficient"]
            if self.weights is not None:
                async with self.placement.hold("train"):
                    await self.weights.sync(first_step)
        await self._announce(first_step)

    async def run(self, first_step: int = 0) -> int:
        """Train until the schedule ends, or the run is to; returns the number of completed steps."""
        for step in range(first_step, self.schedule.steps):
            start = self.clock.time()
            try:
                batch, metrics = await self._train(step)
            except _Stopped:
                await self._save_stopped(step)
                return step
            await self.queue.ack(batch, step=step)
            await self._record(batch, step, metrics, start)
            await self._evaluate_if_due(step + 1)
            await self._save_if_due(step + 1)
            await self._announce(step + 1)
        return self.schedule.steps

    async def _train(self, step: int) -> tuple[BatchMeta, dict[str, float]]:
        """Train on a step's batch. Where rows of it are lost meanwhile, they are made anew, and training goes on."""
        done: Updates = {}
        while True:
            batch = await self._next_batch(step, begun=bool(done))
            try:
                async with self.placement.hold("train"):
                    metrics = await self._estimate(batch, step)
                    metrics |= await self._update(batch, step, done)
                    if self.kl_in_reward:
                        self.kl.update(metrics["reward/kl"], len(trained(batch)))
                    self.updated = step + 1
                    await self._sync_if_due(step)
                return batch, metrics
            except QueueError as error:
                if not is_lost(error):
                    raise
                lost = await self.queue.fail_lost(batch, lost_keys(error))
                if not set(lost) & set(batch.keys):
                    raise
                await self.queue.release(batch)

    async def _next_batch(self, step: int, *, begun: bool) -> BatchMeta:
        async with self.stages.measure("wait", "trainer", step):
            leasing = self.queue.lease_groups(CONSUMER, ticket=step, deadline_seconds=self.batch_seconds)
            stops = not begun and not (self.explores and step % self.schedule.sync_interval)
            batch = await (self._unless_stopped(leasing) if stops else leasing)
            own = len(set(batch.group_ids))
            further = [
                await source.sample(self.queue, CONSUMER, step, own, self.batch_seconds) for source in self.sources
            ]
        if self.explores:
            self.schedule.check(step, _oldest_version(batch))
        for more in filter(None, further):
            batch = batch.joined(more)
        return batch

    async def _unless_stopped(self, leasing: Coroutine[Any, Any, BatchMeta]) -> BatchMeta:
        """Between two steps at which a checkpoint may be cut, a run that is to end waits for no batch."""
        lease, asked = asyncio.ensure_future(leasing), asyncio.ensure_future(self.stop.wait())
        try:
            await asyncio.wait({lease, asked}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
            if self.stop.is_set() or not lease.done():
                lease.cancel()
                await asyncio.wait({lease})
        if self.stop.is_set():
            raise _Stopped
        return lease.result()

    async def _estimate(self, batch: BatchMeta, step: int) -> dict[str, float]:
        """Everything that the loss reads beside the samples: log-probs of other policies, values, advantages."""
        rows = trained(batch)
        if self.reference is not None:
            async with self.stages.measure("reference", "trainer", step):
                await self.reference.compute_log_probs(rows, "ref_log_probs")
        if self.recompute_old_log_probs:
            async with self.stages.measure("old_log_probs", "trainer", step):
                await self.actor.compute_log_probs(rows, "old_log_probs")
        if self.critic is not None:
            async with self.stages.measure("values", "trainer", step):
                await self.critic.engine.compute_values(rows, "values")
        metrics: dict[str, float] = {}
        if self.algorithm.advantages is not None:
            async with self.stages.measure("advantages", "trainer", step):
                metrics.update(await self.estimator.estimate(batch, self.kl.coefficient))
        return metrics

    async def _update(self, batch: BatchMeta, step: int, done: Updates) -> dict[str, float]:
        """``epochs`` passes over the batch, ``mini_batches`` optimizer steps of critic and actor in each.

        Args:
            batch: of the step.
            step: its number.
            done: those that were done before rows of the batch were lost, and are not done again.
        """
        rows = trained(batch)
        parts = mini_batches(rows, self.mini_batches, whole_groups=self.whole_groups) * self.epochs
        async with self.stages.measure("update", "trainer", step):
            for number, part in enumerate(parts):
                if self.critic is not None and ("critic", number) not in done:
                    done["critic", number] = await self._update_critic(self.critic, part, step)
                warm = self.critic is None or step >= self.critic.warmup_steps
                if warm and ("actor", number) not in done:
                    check = self.log_prob_check if not number else None  # before the weights change
                    done["actor", number] = await self._update_actor(part, step, check)
        metrics = _mean([{**done.get(("critic", n), {}), **done.get(("actor", n), {})} for n in range(len(parts))])
        if "policy/kl" in metrics:
            metrics["policy/kl_coefficient"] = self.kl.coefficient
            self.kl.update(metrics["policy/kl"], len(rows))
        return metrics

    async def _update_actor(self, part: BatchMeta, step: int, check: LogProbCheck | None) -> Mapping[str, float]:
        comparison = None
        if check is not None and check.is_due(step):
            engine = "old_log_probs" if self.recompute_old_log_probs else "log_probs"
            comparison = check.comparison(engine, self.updated)
        if self.prepares or (comparison is not None and comparison.engine == "log_probs"):
            await self.actor.compute_log_probs(part, "log_probs")
        if self.prepares:
            await self.estimator.prepare(part)
        options = dict(self.loss_options)
        if "kl" in options:
            options["kl_coefficient"] = self.kl.coefficient
        counts = global_counts(part.tags)
        loss = LossSpec(name=self.algorithm.loss, options=options, global_counts=counts)
        update = await self.actor.update(part, loss, comparison)
        if check is not None and comparison is not None:
            update = check.judge(update, part, step, self.updated)
        _require_finite(update, ("policy/loss", "grad_norm"), step)
        return update

    async def _update_critic(self, critic: Critic, part: BatchMeta, step: int) -> Mapping[str, float]:
        own = part.select(index for index, tags in enumerate(part.tags) if not is_expert(tags))
        loss = LossSpec(name=VALUE_LOSS, options=critic.loss_options, global_counts=global_counts(own.tags))
        update = await critic.engine.update(own, loss)
        _require_finite(update, ("value/loss", "grad_norm"), step)
        return {name if "/" in name else f"critic/{name}": value for name, value in update.items()}

    async def _sync_if_due(self, step: int) -> None:
        """Publish the weights that step made: on schedule, or before an evaluation."""
        due = (self.explores and self.schedule.syncs_after(step)) or self._evaluates_at(step + 1)
        if self.weights is not None and due:
            async with self.stages.measure("sync", "weights", step):
                report = await self.weights.sync(step + 1)
            self.hooks.weights_synced(
                event=WeightsSynced(
                    version=step + 1, receipts=report.receipts, seconds=report.seconds, sent_bytes=report.bytes
                )
            )
            self._published = step + 1

    async def _evaluate_if_due(self, steps_done: int) -> None:
        if self.evaluator is not None and self._evaluates_at(steps_done):
            await self.evaluator.evaluate(self._published)

    def _evaluates_at(self, steps_done: int) -> bool:
        ends = steps_done in (0, self.schedule.steps)
        return self.evaluator is not None and (ends or self._is_due(self.evaluate_every, steps_done))

    async def _save_if_due(self, steps_done: int) -> None:
        """Checkpoint, which makes the steps before it final; a run that cannot go on from one needs no waiting."""
        if not self.checkpoint_every:
            await self.queue.commit(steps_done - 1)
        last = self.checkpoint_at_end and steps_done == self.schedule.steps
        if self.checkpoints is not None and (last or self._is_due(self.checkpoint_every, steps_done)):
            await self._save(self.checkpoints, steps_done)

    async def _save(self, checkpoints: Checkpointer, steps_done: int, *, again_from: int | None = None) -> None:
        await checkpoints.save(steps_done, {"kl_coefficient": self.kl.coefficient}, again_from=again_from)
        self._saved = steps_done

    async def _save_stopped(self, steps_done: int) -> None:
        """Checkpoint where the run is to end. Without an offset, explorers were idle at the end of the last step."""
        if self.checkpoints is not None and steps_done > self._saved:
            await self._save(self.checkpoints, steps_done, again_from=None if self.schedule.sync_offset else steps_done)

    def _is_due(self, every: int, steps_done: int) -> bool:
        """Whether what happens every so many steps happens now; with an explorer, at synchronisations only."""
        return self.schedule.is_due(every, steps_done) if self.explores else bool(every) and steps_done % every == 0

    async def _announce(self, steps_done: int) -> None:
        """Let explorers go on. Last of all, so that without an offset nothing is in flight at a checkpoint."""
        if self.checkpoints is not None:
            self.checkpoints.note_random_state()
        await self.version.advance(self._published)
        await self.steps_done.advance(steps_done)

    async def _record(self, batch: BatchMeta, step: int, metrics: dict[str, float], start: float) -> None:
        """Tell the hooks what the step was like."""
        seconds = self.clock.time() - start
        lengths = [tags["response_tokens"] for tags in batch.tags]
        metrics |= {
            "samples": float(len(batch)),
            "response_tokens/mean": sum(lengths) / len(batch),
            "response_tokens/max": float(max(lengths)),
            "samples_per_second": len(batch) / max(seconds, 1e-9),
            "seconds/step": seconds,
            **said_metrics(batch.tags),
            **self.stages.drain(),
        }
        if self.explores:
            attempts = {group: tags["attempt"] for group, tags in zip(batch.group_ids, batch.tags, strict=True)}
            metrics |= {
                "staleness/max": float(step - _oldest_version(batch)),
                "groups/refills": float(sum(attempts.values())),
            }
        if self.sources:
            metrics |= self._shares(batch, step)
        self.hooks.step_ended(event=StepEnded(step=step + 1, metrics=metrics))
        failed = await self.queue.drain_failures()
        if failed:
            self.hooks.samples_failed(event=SamplesFailed(step=step + 1, reasons=failed))
        if self.recorded:
            shown = batch.select(batch.by_partition()[TRAIN][: self.recorded])
            with suppress_lost():
                samples = await resubmitted(lambda: self._read(shown), "a table of samples")
                self.hooks.samples_recorded(event=SamplesRecorded(step=step + 1, partition=TRAIN, samples=samples))

    @staticmethod
    def _shares(batch: BatchMeta, step: int) -> dict[str, float]:
        """How many samples are not of this step's ticket, by where they are from."""
        counts: dict[str, float] = {}
        for claim, tags in zip(batch.claims, batch.tags, strict=True):
            if claim.partition != TRAIN or tags["ticket"] != step:
                name = f"samples/{'replayed' if claim.partition == TRAIN else claim.partition}"
                counts[name] = counts.get(name, 0.0) + 1.0
        return counts

    async def _read(self, shown: BatchMeta) -> tuple[SampleRecord, ...]:
        reading = self.agents.of(shown.keys[0]).records(TRAIN, shown.keys, shown.tags, with_reward=self.explores)
        who = f"an agent worker to read {len(shown)} samples, {shown.keys[0]} first"
        return await self.clock.wait_for(reading, self.batch_seconds, who)


def _oldest_version(batch: BatchMeta) -> int:
    """Of the weights that made any token of the batch; rows that this run did not generate have none."""
    return min(int(tags["weight_version_min"]) for tags in batch.tags if "weight_version_min" in tags)


def _mean(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(update[name] for update in updates) / len(updates) for name in updates[0]}


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
