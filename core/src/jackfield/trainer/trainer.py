"""The training loop for every schedule and algorithm."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from fractions import Fraction
from math import floor, isfinite
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms import LossSpec
from jackfield.algorithms.losses import VALUE_LOSS
from jackfield.config.sections import MixConfig, ReplayConfig
from jackfield.errors import QueueError, RunError
from jackfield.plugins.hooks import SamplesFailed, SamplesRecorded, StepEnded, WeightsSynced
from jackfield.queue.meta import BatchMeta, Reuse
from jackfield.queue.sample_files import ImportedSamples
from jackfield.runtime.engine import EngineGroup
from jackfield.runtime.profile import flame_graph
from jackfield.runtime.samples import TRAIN, global_counts, mini_batches, oldest_version, own, said_metrics, trained
from jackfield.runtime.workers import is_lost
from jackfield.trainer.checkpoint import Checkpoint, Checkpointer, random_state
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.role import Role
from jackfield.trainer.weights import LogProbCheck, publish

CONSUMER = "trainer"  #: the name under which the trainer leases samples
_SHARED = ("aggregation", "length_norm")  #: options of the policy loss that also apply to the critic's


@attrs.define(kw_only=True, eq=False)
class Step:
    """The state of one training step, which survives a batch whose samples are lost."""

    number: int
    started: float
    batch: BatchMeta = attrs.field(init=False)
    rows: BatchMeta = attrs.field(init=False)  #: the samples of the batch that models are trained on
    leased: bool = False  #: whether the trainer holds the lease on ``batch``
    metrics: dict[str, float] = attrs.field(factory=dict)
    updates: dict[tuple[str, int], Mapping[str, float]] = attrs.field(factory=dict)  #: by role and mini-batch
    trained: bool = False


@attrs.define(kw_only=True, eq=False)
class Trainer:
    """Trains on the batch of each step and publishes weights on the schedule."""

    role: Role
    actor: EngineGroup
    critic: EngineGroup | None = None
    reference: EngineGroup | None = None  #: None: a reference policy is the actor without its adapter
    sync: Callable[[int], Awaitable[WeightsSynced]] | None = None  #: publishes a version; None: there are no replicas
    stop: asyncio.Event = attrs.field(factory=asyncio.Event)  #: set when the run has to stop at the next boundary
    log_prob_check: LogProbCheck = attrs.field(init=False)
    evaluator: Evaluator = attrs.field(init=False)
    checkpoints: Checkpointer = attrs.field(init=False)
    kl_coefficient: float = attrs.field(init=False)  #: of the KL penalty, in the loss or in the reward
    #: what is added to the step's own groups, by partition; in the training partition: used groups, replayed
    _mixed: dict[str, ReplayConfig | MixConfig] = attrs.field(init=False)
    _synced: WeightsSynced | None = attrs.field(default=None, init=False)  #: report of the newest published version
    _published: int = attrs.field(default=0, init=False)  #: the weight version that the replicas serve

    def __attrs_post_init__(self) -> None:
        """Create the parts that need only the role, and start from the configured KL coefficient."""
        role = self.role
        trained = {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}
        self.log_prob_check, self.evaluator = LogProbCheck(role=role), Evaluator(role=role)
        self.checkpoints = Checkpointer(role=role, engines=trained)
        self.kl_coefficient = role.config.algorithm.kl.coefficient
        named = attrs.asdict(role.config.mixing, recurse=False)
        self._mixed = {TRAIN if name == "replay" else name: each for name, each in named.items() if each is not None}

    async def begin(self, checkpoint: Checkpoint | None = None, imported: Sequence[ImportedSamples] = ()) -> int:
        """Put ``imported`` samples and evaluate the initial model, or restore a checkpoint and send its weights.

        Return the first step. Explorers start at the end of this call.
        """
        role, first_step = self.role, 0
        generated = ("rollout_log_probs", "reward") if role.explores else ()
        columns = ("prompt_ids", "response_ids", "response_mask", *generated)
        register = role.queue.register_consumer  # before any sample is put
        await register(CONSUMER, TRAIN, columns)
        for partition, each in self._mixed.items():
            reuse = Reuse(**{field.name: getattr(each, field.name) for field in attrs.fields(Reuse)})
            await register(_consumer(partition), partition, columns, sampler=each.sampler, reuse=reuse)
        if checkpoint is None:
            await role.queue.clear()
            for samples in imported:
                await samples.put()
            await self.evaluate(0)
        else:
            restored, first_step = await self.checkpoints.load(checkpoint), checkpoint.step
            self.kl_coefficient = restored["kl_coefficient"]
            self._published = role.updated = first_step
            if self.sync is not None:
                async with role.train_devices.hold("train"):
                    self._synced = await self.sync(first_step)
        await self.release_explorers(first_step)
        return first_step

    async def run(self, first_step: int = 0) -> int:
        """Train until the schedule ends or a stop is requested; return the completed steps."""
        for number in range(first_step, self.role.schedule.steps):
            async with self.profile(number + 1):
                step = Step(number=number, started=self.role.clock.time())
                while not step.trained:
                    async with self.recover_lost_samples(step):
                        if not await self.next_batch(step):
                            return await self.checkpoint_before(step)
                        async with self.role.train_devices.hold("train"):
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
        return self.role.schedule.steps

    @asynccontextmanager
    async def recover_lost_samples(self, step: Step) -> AsyncIterator[None]:
        """Release a batch that lost samples; stages then run again, completed updates do not."""
        try:
            yield
        except QueueError as error:
            if not (step.leased and is_lost(error) and await self.role.give_back_lost(step.batch, error)):
                raise
            step.leased = False
        else:
            step.trained = step.leased

    @asynccontextmanager
    async def profile(self, step: int) -> AsyncIterator[None]:
        """Profile the ranks and this process's event loop in a step, counted from 1, if the configuration names it."""
        if not any(step in steps for steps in self.role.config.profiled_steps):
            yield
            return
        folder = Path(self.role.config.folder, "profile", f"step-{step}")
        engines = [each for each in (self.actor, self.critic, self.reference) if each is not None]
        for engine in engines:
            await engine.begin_trace()
        with flame_graph(folder / "controller.html", f"step {step}"):
            yield
        for engine in engines:
            await engine.end_trace(str(folder))

    # -- the stages of a step, in order

    async def next_batch(self, step: Step) -> bool:
        """Lease the batch of the step. Return False if the run has to stop before this step.

        A requested stop takes effect here if the step has made no update and a checkpoint can be cut before it. A batch
        that is staler than the schedule allows, or not complete in time, is refused.
        """
        queue, schedule, seconds = self.role.queue, self.role.schedule, self.role.config.deadlines.batch
        async with self.role.measure("next_batch", "trainer", step.number):
            leasing = asyncio.ensure_future(queue.lease(CONSUMER, batch=step.number, deadline_seconds=seconds))
            if not (step.updates or (schedule.explores and step.number % schedule.sync_interval)):
                stopped: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
                try:
                    await asyncio.wait({leasing, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    if self.stop.is_set() or not leasing.done():
                        leasing.cancel()
                        await asyncio.wait({leasing})
                if self.stop.is_set():
                    return False
            batch = await leasing
            mixed, groups = [], len(set(batch.groups))
            for partition, each in self._mixed.items():
                if more := further_groups(each.ratio, step.number, groups):
                    which: dict[str, Any] = {"step": step.number, "fresh": partition != TRAIN}
                    mixed.append(await queue.lease(_consumer(partition), more, deadline_seconds=seconds, **which))
            if schedule.explores:
                schedule.check(step.number, oldest_version(batch.tags))
            for added in filter(None, mixed):
                batch = batch.joined(added)
        step.batch, step.rows, step.leased = batch, trained(batch), True
        return True

    async def reference_log_probs(self, step: Step) -> None:
        """Compute log-probs of the reference policy, if the algorithm has one."""
        if self.role.algorithm.reference:
            async with self.role.measure("reference_log_probs", "trainer", step.number):
                model, off = self.reference or self.actor, self.reference is None
                await model.compute("log_probs", step.rows, "ref_log_probs", adapter_off=off)

    async def old_log_probs(self, step: Step) -> None:
        """Compute log-probs of the policy before the update, unless the rollout's are used."""
        if self.role.algorithm.recompute_old_log_probs:
            async with self.role.measure("old_log_probs", "trainer", step.number):
                await self.actor.compute("log_probs", step.rows, "old_log_probs")

    async def values(self, step: Step) -> None:
        """Compute the critic's values, if there is a critic."""
        if self.critic is not None:
            async with self.role.measure("values", "trainer", step.number):
                await self.critic.compute("values", step.rows, "values")

    async def advantages(self, step: Step) -> None:
        """Compute advantages from rewards, unless the algorithm trains on given answers."""
        if self.role.algorithm.advantages is not None:
            async with self.role.measure("advantages", "trainer", step.number):
                metrics, written = await self.role.workers.estimator.estimate(step.batch, self.kl_coefficient)
                await self.role.queue.add_columns(step.rows, written)
                step.metrics |= metrics

    async def update_critic(self, step: Step) -> None:
        """Run the critic's optimizer steps on the batch."""
        if self.critic is not None:
            async with self.role.measure("update_critic", "trainer", step.number):
                taken = {name: value for name, value in self.role.algorithm.loss_options.items() if name in _SHARED}
                options = {"clip": self.role.config.critic.clip, **taken}
                for key, part in self._open_updates("critic", step):
                    mine = own(part)
                    loss = LossSpec(name=VALUE_LOSS, options=options, global_counts=global_counts(mine.tags))
                    update, _ = await self.critic.update(mine, loss)
                    _finite(update, "value/loss", step)
                    named = {name if "/" in name else f"critic/{name}": value for name, value in update.items()}
                    step.updates[key] = named

    async def update_actor(self, step: Step) -> None:
        """Run the policy's optimizer steps on the batch, once the critic's warm-up is over."""
        async with self.role.measure("update_actor", "trainer", step.number):
            if self.critic is None or step.number >= self.role.config.critic.warmup_steps:
                for key, part in self._open_updates("actor", step):
                    step.updates[key] = await self._actor_step(part, step, first=key == ("actor", 0))
        found: dict[str, list[float]] = {}
        for update in step.updates.values():
            for name, value in update.items():
                found.setdefault(name, []).append(value)
        step.metrics |= {name: sum(values) / len(values) for name, values in found.items()}
        if "policy/kl" in step.metrics:
            step.metrics["policy/kl_coefficient"] = self.kl_coefficient
        if (kl := step.metrics.get("policy/kl", step.metrics.get("reward/kl"))) is not None:
            settings = self.role.config.algorithm.kl
            self.kl_coefficient = settings.adapted(self.kl_coefficient, kl, len(step.rows))
        self.role.updated = step.number + 1

    async def publish_weights(self, step: Step) -> None:
        """Send the new weights to the replicas if the schedule or an evaluation needs them."""
        version = step.number + 1
        if self.sync and (self.role.schedule.syncs_after(step.number) or self.evaluator.is_due(version)):
            async with self.role.measure("publish_weights", "trainer", step.number):
                self._synced = await self.sync(version)
            self.role.hooks.emit(self._synced)
            self._published = version

    async def acknowledge(self, step: Step) -> None:
        """Acknowledge the batch to the queue, and report the step to the hooks."""
        role, hooks, done = self.role, self.role.hooks, step.number + 1
        await role.queue.ack(step.batch, step=step.number)  # final with the next checkpoint
        hooks.emit(StepEnded(step=done, metrics={**step.metrics, **self._measured(step)}))
        await self.report_failures()
        if shown := role.config.observe.samples_per_step:
            chosen = step.batch.select(step.batch.by_partition()[TRAIN][:shown])
            if samples := await role.records(TRAIN, chosen.keys, chosen.tags, with_reward=role.explores):
                hooks.emit(SamplesRecorded(step=done, partition=TRAIN, samples=samples))

    async def report_failures(self) -> None:
        """Report the samples that have failed since the last report to the hooks."""
        if failed := await self.role.queue.drain_failures():
            self.role.hooks.emit(SamplesFailed(step=self.role.steps_done.value + 1, reasons=failed))

    async def evaluate(self, steps_done: int) -> None:
        """Evaluate the weights that the replicas serve, if an evaluation is due."""
        if self.evaluator.is_due(steps_done):
            await self.evaluator.evaluate(self._published)

    async def checkpoint(self, steps_done: int) -> None:
        """Write a checkpoint if one is due. It makes the acks of the steps before it final."""
        if not self.role.config.checkpoint.every:
            await self.role.queue.commit(steps_done - 1)  # no run can resume from here, so acks are final now
        if self.checkpoints.is_due(steps_done):
            await self.checkpoints.save(steps_done, {"kl_coefficient": self.kl_coefficient})

    async def checkpoint_before(self, step: Step) -> int:
        """Write a checkpoint of the state before a step. Return the number of completed steps.

        Without an offset, explorers were idle when the last step ended, so a resumed run regenerates this batch.
        """
        if step.number > self.checkpoints.saved:
            again_from = None if self.role.schedule.sync_offset else step.number
            await self.checkpoints.save(step.number, {"kl_coefficient": self.kl_coefficient}, again_from=again_from)
        return step.number

    async def release_explorers(self, steps_done: int) -> None:
        """Let explorers continue; it is the last stage, so that checkpoints are undisturbed."""
        self.checkpoints.random = random_state()
        if self.role.name == "train":
            await publish(self.role, self._synced, self._published)
        await self.role.version.advance(self._published)
        await self.role.steps_done.advance(steps_done)

    # -- parts of stages

    def _open_updates(self, role: str, step: Step) -> Iterator[tuple[tuple[str, int], BatchMeta]]:
        """Yield the mini-batches of all epochs that no optimizer step has used yet."""
        settings = self.role.config.algorithm
        parts = mini_batches(step.rows, settings.mini_batches, whole_groups=self.role.algorithm.whole_groups)
        for index, part in enumerate(parts * settings.epochs):
            if (role, index) not in step.updates:
                yield (role, index), part

    async def _actor_step(self, part: BatchMeta, step: Step, *, first: bool) -> Mapping[str, float]:
        algorithm, check = self.role.algorithm, self.log_prob_check
        comparison = check.comparison(step.number) if first else None  # before the weights change
        if algorithm.prepares or (comparison is not None and comparison.engine == "log_probs"):
            await self.actor.compute("log_probs", part, "log_probs")
        if algorithm.prepares:
            await self.role.queue.add_columns(part, await self.role.workers.estimator.prepare(part))
        options = dict(algorithm.loss_options)
        if "kl" in options:
            options["kl_coefficient"] = self.kl_coefficient
        loss = LossSpec(name=algorithm.loss, options=options, global_counts=global_counts(part.tags))
        update, found = await self.actor.update(part, loss, comparison)
        if comparison is not None:
            check.judge(found, part, step.number)
        return _finite(update, "policy/loss", step)

    def _measured(self, step: Step) -> dict[str, float]:
        """Return metrics of the step's batch, stages and throughput."""
        tags, seconds = step.batch.tags, self.role.clock.time() - step.started
        lengths = [each["response_tokens"] for each in tags]
        measured = {
            "samples": float(len(lengths)),
            "response_tokens/mean": sum(lengths) / len(lengths),
            "response_tokens/max": float(max(lengths)),
            "samples_per_second": len(lengths) / max(seconds, 1e-9),
            "seconds/step": seconds,
            **said_metrics(tags),
            **self.role.drain(),
        }
        if self.role.explores:
            retries = {group: each["retry"] for group, each in zip(step.batch.groups, tags, strict=True)}
            measured["staleness/max"] = float(step.number - oldest_version(tags))
            measured["groups/retries"] = float(sum(retries.values()))
        for lease, each in zip(step.batch.leases, tags, strict=True):
            if lease.partition != TRAIN or each["batch"] != step.number:  # it is replayed or mixed in
                name = f"samples/{'replayed' if lease.partition == TRAIN else lease.partition}"
                measured[name] = measured.get(name, 0.0) + 1.0
        return measured


def _finite(update: Mapping[str, float], loss: str, step: Step) -> Mapping[str, float]:
    """Refuse an update whose loss or gradient norm is not finite."""
    for name in (loss, "grad_norm"):
        if not isfinite(update[name]):
            details = {"where": f"step {step.number + 1}", "expected": "a finite number", "found": update[name]}
            fix = "lower optimizer.lr or optimizer.clip_grad, or look at the rewards; the step was not applied"
            raise RunError(f"{name} is {update[name]}", code="run.not-finite", fix=fix, **details)
    return update


def further_groups(ratio: float, step: int, own: int) -> int:
    """Return how many groups to mix into a batch, so that the ratio holds over all steps."""
    each = own * Fraction(str(ratio))
    return floor((step + 1) * each) - floor(step * each)


def _consumer(partition: str) -> str:
    return CONSUMER if partition == TRAIN else f"{CONSUMER}/{partition}"
