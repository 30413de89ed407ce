"""The training loop for every schedule and algorithm."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path
from typing import Any

import attrs

from jackfield.algorithms import LossSpec
from jackfield.algorithms.losses import VALUE_LOSS
from jackfield.errors import QueueError
from jackfield.plugins.hooks import SamplesFailed, SamplesRecorded, StepEnded, WeightsSynced
from jackfield.queue.meta import BatchMeta
from jackfield.queue.sample_files import ImportedSamples
from jackfield.runtime.engine import EngineGroup
from jackfield.runtime.profile import flame_graph
from jackfield.runtime.samples import TRAIN, global_counts, mini_batches, own, trained
from jackfield.runtime.tags import said_metrics
from jackfield.runtime.workers import is_lost
from jackfield.trainer.checkpoint import Checkpoint, Checkpointer
from jackfield.trainer.evaluation import Evaluator
from jackfield.trainer.initial_kl import InitialKL
from jackfield.trainer.late_labels import LateLabels
from jackfield.trainer.limits import Limits
from jackfield.trainer.random_state import random_state
from jackfield.trainer.role import Role
from jackfield.trainer.steps import Step, StepSource, finite, mean_metrics
from jackfield.trainer.weights import LogProbCheck, publish

_SHARED = ("aggregation", "length_norm")  #: options of the policy loss that also apply to the critic's


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
    source: StepSource = attrs.field(init=False)
    limits: Limits = attrs.field(init=False)
    labels: LateLabels = attrs.field(init=False)
    initial_kl: InitialKL = attrs.field(init=False)
    kl_coefficient: float = attrs.field(init=False)  #: of the KL penalty, in the loss or in the reward
    _synced: WeightsSynced | None = attrs.field(default=None, init=False)  #: report of the newest published version
    pausable: int | None = attrs.field(default=0, init=False)  #: the completed steps, while a stop takes effect at once
    _published: int = attrs.field(default=0, init=False)  #: the weight version that the replicas serve

    def __attrs_post_init__(self) -> None:
        """Create the parts that need only the role, and start from the configured KL coefficient."""
        role = self.role
        trained = {"actor": self.actor} if self.critic is None else {"actor": self.actor, "critic": self.critic}
        self.log_prob_check, self.evaluator = LogProbCheck(role=role), Evaluator(role=role)
        self.checkpoints = Checkpointer(role=role, engines=trained if role.engines else {})
        self.limits, self.labels = Limits(role=role), LateLabels(role=role)
        self.initial_kl = InitialKL(role=role, actor=self.actor)
        self.source, self.kl_coefficient = StepSource(role=role), role.config.algorithm.kl.coefficient

    async def begin(self, checkpoint: Checkpoint | None = None, imported: Sequence[ImportedSamples] = ()) -> int:
        """Put ``imported`` samples and evaluate the initial model, or restore a checkpoint and send its weights.

        Return the first step. Explorers start at the end of this call.
        """
        role, first_step, data = self.role, 0, self.role.config.data
        given = role.config.mode == "train" and data.samples is None  # the queue has what an earlier run collected
        await self.source.register()
        if checkpoint is None:
            if not given:
                await role.queue.clear()
            for samples in imported:
                await samples.put()
            if role.config.mode == "train":
                await self.limits.use_up_data()
            if given:
                await self.checkpoints.save(0, self._state())  # what is in the queue cannot be made again
            await self.evaluate(0)
        else:
            async with role.train_devices.hold("train"):
                restored, first_step = await self.checkpoints.load(checkpoint), checkpoint.step
            self.kl_coefficient = restored["kl_coefficient"]
            self.limits.restore(restored.get("used", {}))
            self.labels.version = restored.get("labels", 0)
            if role.curriculum is not None:
                role.curriculum.restore(restored["curriculum"])
            self.limits.check(first_step, self.limits.used)  # they may be lower now
            self._published = role.updated = first_step if role.engines else 0
            if self.sync is not None and first_step:
                async with role.train_devices.hold("train"):
                    self._synced = await self.sync(first_step)
        await self.release_explorers(first_step)
        return first_step

    async def run(self, first_step: int = 0) -> int:
        """Train until the schedule ends or a stop is requested; return the completed steps."""
        number = first_step
        while number < self.role.schedule.steps:
            async with self.profile(number + 1):
                step = Step(number=number, started=self.role.clock.time(), sizes=self.source.sizes)
                while not step.trained:
                    async with self.recover_lost_samples(step):
                        if not await self.next_part(step):
                            return await self.checkpoint_before(step)
                        async with self.role.train_devices.hold("train"):
                            await self.reference_log_probs(step)
                            await self.old_log_probs(step)
                            await self.values(step)
                            step.passed.update(step.new.groups)
                            if step.index is not None and self.role.engines:
                                await self.advantages(step)
                                await self.update_critic(step)
                                await self.update_actor(step)
                            if step.is_whole:
                                await self.publish_weights(step)
                await self.acknowledge(step)
                await self.evaluate(number + 1)
                await self.labels.apply()
                await self.checkpoint(number + 1)
            await self.release_explorers(number := number + 1)
        await self.checkpoints.finish()
        return number

    @asynccontextmanager
    async def recover_lost_samples(self, step: Step) -> AsyncIterator[None]:
        """Release parts that lost samples; stages then run again, completed updates do not."""
        try:
            yield
        except QueueError as error:
            if not (step.leased and is_lost(error)):
                raise
            over = len(step.sizes) * (self.role.config.algorithm.epochs - 1)  # their last updates, which read no more
            done = {number for number in step.parts if len(step.sizes) > 1 and ("actor", over + number) in step.updates}
            parts = step.parts if step.index is not None else {-1: step.part}
            held = {number: part for number, part in parts.items() if number not in done}
            found = [number for number, part in held.items() if await self.role.give_back_lost(part, error)]
            if not found:
                raise
            for number in found:
                step.parts.pop(number, None)
            step.leased = False
        else:
            step.is_staged, step.trained = step.leased, step.is_whole

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

    async def next_part(self, step: Step) -> bool:
        """Lease the step's batch or next mini-batch. Return False if the run has to stop before this step.

        When mini-batches are streamed, the first part is the batch before its rewards, if log-probs or values of it are
        needed. A requested stop takes effect here if the step has made no update and a checkpoint can be cut before it.
        A batch that is staler than the schedule allows, or not complete in time, is refused.
        """
        schedule, index = self.role.schedule, self.source.next_index(step)
        async with self.role.measure("next_batch", "trainer", step.number):
            leasing = asyncio.ensure_future(self.source.lease(step, index))
            if not (step.updates or (schedule.explores and step.number % schedule.sync_interval)):
                stopped: asyncio.Future[Any] = asyncio.ensure_future(self.stop.wait())
                self.pausable = step.number
                try:
                    await asyncio.wait({leasing, stopped}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    stopped.cancel()
                    if self.stop.is_set() or not leasing.done():
                        leasing.cancel()
                        await asyncio.wait({leasing})
                if self.stop.is_set():
                    return False
                self.pausable = None
            step.take(await leasing, index)
        return True

    async def reference_log_probs(self, step: Step) -> None:
        """Compute log-probs of the reference policy, if the algorithm has one."""
        if self.role.algorithm.reference and step.new and self.role.engines:
            async with self.role.measure("reference_log_probs", "trainer", step.number):
                model, off = self.reference or self.actor, self.reference is None
                await model.compute("log_probs", step.new, "ref_log_probs", adapter_off=off)

    async def old_log_probs(self, step: Step) -> None:
        """Compute log-probs of the policy before the update, unless the rollout's are used."""
        if self.role.algorithm.recompute_old_log_probs and step.new and self.role.engines:
            async with self.role.measure("old_log_probs", "trainer", step.number):
                await self.actor.compute("log_probs", step.new, "old_log_probs")

    async def values(self, step: Step) -> None:
        """Compute the critic's values, if there is a critic."""
        if self.critic is not None and step.new:
            async with self.role.measure("values", "trainer", step.number):
                await self.critic.compute("values", step.new, "values")

    async def advantages(self, step: Step) -> None:
        """Compute advantages from rewards, unless the algorithm trains on given answers."""
        if self.role.algorithm.advantages is not None:
            async with self.role.measure("advantages", "trainer", step.number):
                correction = self.role.algorithm.correction
                version = self.role.updated if correction is not None and correction.by_token else None
                metrics, written = await self.role.workers.estimator.estimate(step.part, self.kl_coefficient, version)
                await self.role.queue.add_columns(step.rows, written)
                step.estimates[step.index] = len(step.rows), metrics

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
                    found = finite(update, "value/loss", step, self.role.config.critic.optimizer)
                    named = {name if "/" in name else f"critic/{name}": value for name, value in found.items()}
                    step.updates[key] = named

    async def update_actor(self, step: Step) -> None:
        """Run the policy's optimizer steps on the batch, once the critic's warm-up is over."""
        await self.initial_kl.keep(step)
        async with self.role.measure("update_actor", "trainer", step.number):
            if self.critic is None or step.number >= self.role.config.critic.warmup_steps:
                for key, part in self._open_updates("actor", step):
                    step.updates[key] = await self._actor_step(part, step, first=key == ("actor", 0))
        if step.is_whole:
            await self.initial_kl.measure(step)
            self._end_updates(step)

    def _end_updates(self, step: Step) -> None:
        """Take the metrics of all parts and updates, and adapt the KL coefficient."""
        updates = [(1, update) for update in step.updates.values()]
        step.metrics |= mean_metrics([*step.estimates.values()]) | mean_metrics(updates)
        if "policy/kl" in step.metrics:
            step.metrics["policy/kl_coefficient"] = self.kl_coefficient
        if (kl := step.metrics.get("policy/kl", step.metrics.get("reward/kl"))) is not None:
            settings = self.role.config.algorithm.kl
            self.kl_coefficient = settings.adapted(self.kl_coefficient, kl, len(trained(step.batch)))
        self.role.updated = step.number + 1
        self.role.whole.set()

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
        for number, part in sorted(step.parts.items()) if role.engines else ():  # final with the next checkpoint
            await role.queue.ack(part, step=step.number, mini_batch=number if len(step.parts) > 1 else None)
        self.limits.count(done, step.batch.tags, role.clock.time() - step.started)
        self.limits.check(done, {"reward": step.metrics.get("reward/mean", -inf)})
        learnt = {} if role.curriculum is None else role.curriculum.end(step.number)
        passed = {**learnt, **await role.queue.drain_metrics()}
        hooks.emit(StepEnded(step=done, metrics={**step.metrics, **passed, **self._measured(step)}))
        await self.report_failures()
        if shown := role.config.observe.samples_per_step:
            chosen = step.batch.select(step.batch.by_partition()[TRAIN][:shown])
            scored = role.config.mode != "offline"
            if samples := await role.records(TRAIN, chosen.keys, chosen.tags, with_reward=scored):
                hooks.emit(SamplesRecorded(step=done, partition=TRAIN, samples=samples))

    async def report_failures(self) -> None:
        """Report the samples that have failed since the last report to the hooks."""
        if failed := await self.role.queue.drain_failures():
            self.role.hooks.emit(SamplesFailed(step=self.role.steps_done.value + 1, reasons=failed))

    async def evaluate(self, steps_done: int) -> None:
        """Evaluate the weights that the replicas serve, if an evaluation is due."""
        if self.evaluator.is_due(steps_done):
            score = await self.evaluator.evaluate(self._published)
            self.limits.check(steps_done, {"score": score})

    async def checkpoint(self, steps_done: int) -> None:
        """Write a checkpoint if one is due. It makes the acks of the steps before it final."""
        if not self.role.config.checkpoint.every:
            await self.role.queue.commit(steps_done - 1)  # no run can resume from here, so acks are final now
        if self.checkpoints.is_due(steps_done):
            background = 0 < self.role.config.checkpoint.background and steps_done < self.role.schedule.steps
            await self.checkpoints.save(steps_done, self._state(), background=background)
        elif self.checkpoints.is_finished_after(steps_done):
            await self.checkpoints.finish()

    def _state(self) -> dict[str, Any]:
        learnt = {} if self.role.curriculum is None else {"curriculum": self.role.curriculum.state()}
        own = {"kl_coefficient": self.kl_coefficient, "labels": self.labels.version}
        return {**own, **learnt, "used": self.limits.used}

    async def checkpoint_before(self, step: Step) -> int:
        """Write a checkpoint of the state before a step. Return the number of completed steps.

        Without an offset, explorers were idle when the last step ended, so a resumed run regenerates this batch.
        """
        await self.checkpoints.finish()
        if step.number > self.checkpoints.saved:
            schedule = self.role.schedule
            ahead = schedule.sync_offset or schedule.is_async or self.role.config.mode in ("train", "explore")
            await self.checkpoints.save(step.number, self._state(), again_from=None if ahead else step.number)
        return step.number

    async def release_explorers(self, steps_done: int) -> None:
        """Let explorers continue; it is the last stage, so that checkpoints are undisturbed."""
        self.checkpoints.random = random_state()
        if self.role.name == "train" or not self.role.engines:
            await publish(self.role, self._synced, self._published)
        await self.role.version.advance(self._published)
        await self.role.steps_done.advance(steps_done)

    # -- parts of stages

    def _open_updates(self, role: str, step: Step) -> Iterator[tuple[tuple[str, int], BatchMeta]]:
        """Yield the mini-batches of all epochs that no optimizer step has used yet; further epochs have to be whole."""
        settings, whole = self.role.config.algorithm, self.role.algorithm.whole_groups
        if self.role.schedule.stream_mini_batches:
            parts = {number: trained(part) for number, part in sorted(step.parts.items())}
        else:
            parts = dict(enumerate(mini_batches(step.rows, settings.mini_batches, whole_groups=whole)))
        for epoch in range(settings.epochs if step.is_whole else 1):
            for number, part in parts.items():
                if (key := (role, epoch * settings.mini_batches + number)) not in step.updates:
                    self.role.whole.clear()
                    yield key, part

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
        return finite(update, "policy/loss", step, self.role.config.optimizer)

    def _measured(self, step: Step) -> dict[str, float]:
        """Return metrics of the step's batch, stages and throughput."""
        tags, seconds = step.batch.tags, self.role.clock.time() - step.started
        lengths, role = [each["response_tokens"] for each in tags], self.role
        prompts = [each.get("prompt_tokens", 0) for each in tags]
        measured = {
            "samples": float(len(lengths)),
            "response_tokens/mean": sum(lengths) / len(lengths),
            "response_tokens/max": float(max(lengths)),
            "samples_per_second": len(lengths) / max(seconds, 1e-9),
            "tokens_per_second": (tokens := (sum(lengths) + sum(prompts)) / max(seconds, 1e-9)),
            "tokens_per_second/device": tokens / role.workers.devices,
            "seconds/step": seconds,
            **said_metrics(tags),
            **self.role.drain(),
        }
        if ends := [each["finish_reason"] for each in tags if "finish_reason" in each]:
            measured["truncated"] = ends.count("length") / len(ends)
        if self.role.explores:
            retries = {group: each["retry"] for group, each in zip(step.batch.groups, tags, strict=True)}
            measured["groups/retries"] = float(sum(retries.values()))
        aged = [each["weight_version_min"] for each in tags if self.role.engines and "weight_version_min" in each]
        if ages := [max(step.number - version, 0) for version in aged]:
            measured |= {"staleness/max": float(max(ages)), "staleness/mean": sum(ages) / len(ages)}
            measured |= {f"staleness/samples/{age}": float(count) for age, count in sorted(Counter(ages).items())}
        for devices in (self.role.train_devices, self.role.rollout_devices):  # one lease, if they are shared
            measured |= {f"waits/{name}/devices": seconds for name, seconds in devices.waited.items()}
            devices.waited.clear()
        for lease, each in zip(step.batch.leases, tags, strict=True):
            is_new = each["batch"] == step.number or self.role.config.mode == "train"
            if lease.partition != TRAIN or not is_new:  # it is replayed or mixed in
                name = f"samples/{'replayed' if lease.partition == TRAIN else lease.partition}"
                measured[name] = measured.get(name, 0.0) + 1.0
        return measured
