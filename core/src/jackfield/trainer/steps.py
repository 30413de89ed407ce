"""The state of a training step, and what it leases from the queue: its batch, mini-batches, or any complete groups."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import floor, isfinite
from typing import Any

import attrs

from jackfield.abc.engine import OptimizerSpec
from jackfield.config.sections import MadeConfig, MixConfig, ReplayConfig
from jackfield.errors import RunError
from jackfield.queue.meta import BatchMeta, Reuse, SamplerSpec
from jackfield.runtime.experiences import MADE
from jackfield.runtime.samples import TRAIN, oldest_version, trained
from jackfield.trainer.role import Role

CONSUMER = "trainer"  #: the name under which the trainer leases samples
FORWARD = "log_probs"  #: and those whose log-probs and values it computes while their rewards are pending


@attrs.define(kw_only=True, eq=False)
class Step:
    """The state of one training step, which survives samples that are lost.

    A step has one part, its batch. With ``schedule.stream_mini_batches`` each mini-batch is a part.
    """

    number: int
    started: float
    sizes: Sequence[int | None]  #: number of groups of each part; None: all of the batch
    part: BatchMeta = attrs.field(init=False)  #: what was leased last
    index: int | None = None  #: the number of that part; None: samples whose rewards are pending
    leased: bool = False  #: whether the trainer holds the lease on it
    groups: dict[int, list[str]] = attrs.field(factory=dict)  #: of each part, which are leased again after a loss
    parts: dict[int, BatchMeta] = attrs.field(factory=dict)  #: by number, the last one included
    rows: BatchMeta = attrs.field(init=False)  #: the samples of the part that models are trained on
    new: BatchMeta = attrs.field(init=False)  #: the samples of the part without log-probs and values
    passed: set[str] = attrs.field(factory=set)  #: groups that have them
    is_staged: bool = False  #: whether those of the batch were computed before its rewards came
    metrics: dict[str, float] = attrs.field(factory=dict)
    #: by part: number of samples and their metrics
    estimates: dict[int | None, tuple[int, Mapping[str, float]]] = attrs.field(factory=dict)
    updates: dict[tuple[str, int], Mapping[str, float]] = attrs.field(factory=dict)  #: by role and mini-batch
    trained: bool = False

    @property
    def batch(self) -> BatchMeta:
        """All samples of the parts so far."""
        return functools.reduce(BatchMeta.joined, [self.parts[number] for number in sorted(self.parts)])

    @property
    def is_whole(self) -> bool:
        """Return whether all parts are here."""
        return len(self.parts) == len(self.sizes)

    def take(self, part: BatchMeta, index: int | None) -> None:
        """Continue with a part that was leased."""
        self.part, self.index, self.leased, self.rows = part, index, True, trained(part)
        if index is not None:
            self.parts[index] = part
        chosen = part if index is None else self.rows
        self.new = chosen.select(at for at, group in enumerate(chosen.groups) if group not in self.passed)


@attrs.define(kw_only=True, eq=False)
class StepSource:
    """Leases the parts of each step, as the schedule says."""

    role: Role
    sizes: Sequence[int | None] = attrs.field(init=False)  #: of the parts of a step, in groups; None: the whole batch
    #: what is added to the step's own groups, by partition; in the training partition: used groups, replayed
    _mixed: dict[str, ReplayConfig | MixConfig | MadeConfig] = attrs.field(init=False)
    _forward: Sequence[str] = attrs.field(init=False)  #: columns that are computed before rewards come

    def __attrs_post_init__(self) -> None:
        """Split a batch into its parts, and find what has to be known of all of it before the first update."""
        config, algorithm, streams = self.role.config, self.role.algorithm, self.role.schedule.stream_mini_batches
        groups, count = config.data.groups_per_batch + algorithm.experts, config.algorithm.mini_batches
        self.sizes = [groups // count + (number < groups % count) for number in range(count)] if streams else (None,)
        passes = {"ref_log_probs": algorithm.reference, "old_log_probs": algorithm.recompute_old_log_probs}
        passes["values"] = algorithm.critic
        self._forward = [name for name, needed in passes.items() if needed and streams]
        named = attrs.asdict(config.mixing, recurse=False)
        self._mixed = {TRAIN if name == "replay" else name: each for name, each in named.items() if each is not None}

    async def register(self) -> None:
        """Register the trainer with the queue, before any sample is put."""
        config, epochs = self.role.config, dict[str, Any]()
        generated = ("rollout_log_probs", "reward") if config.mode != "offline" else ()
        columns, register = ("prompt_ids", "response_ids", "response_mask"), self.role.queue.register_consumer
        if config.mode == "train":
            epochs["sampler"] = SamplerSpec(options={"epochs": True})
            epochs["reuse"] = Reuse(max_uses=config.data.epochs)
        await register(CONSUMER, TRAIN, columns + generated, **epochs)
        if self._forward:
            await register(FORWARD, TRAIN, columns, writes=self._forward)
        for partition, each in self._mixed.items():
            reuse = Reuse(**{field.name: getattr(each, field.name) for field in attrs.fields(Reuse)})
            await register(_consumer(partition), partition, columns + generated, sampler=each.sampler, reuse=reuse)

    def next_index(self, step: Step) -> int | None:
        """Return the number of the step's next part; None: its batch, whose rewards are pending."""
        if self._forward and not step.is_staged:
            return None
        return min(set(range(len(self.sizes))) - step.parts.keys())

    async def lease(self, step: Step, index: int | None) -> BatchMeta:
        """Lease a part of a step, and refuse one that is staler than the schedule allows."""
        queue, schedule, seconds = self.role.queue, self.role.schedule, self.role.config.deadlines.batch
        if index in step.groups:
            batch = await queue.lease(CONSUMER, again=step.groups[index], deadline_seconds=seconds)
        elif schedule.is_async:
            batch = await self._lease_any(step)
        elif self.role.config.mode == "train":
            most = self.role.config.data.groups_per_batch
            batch = await queue.lease(CONSUMER, most, step=step.number, deadline_seconds=seconds)
        else:
            consumer, groups = (FORWARD, None) if index is None else (CONSUMER, step.sizes[index])
            batch = await queue.lease(consumer, groups, batch=step.number, deadline_seconds=seconds)
        if schedule.explores and batch:
            schedule.check(step.number, oldest_version(batch.tags))
        batch = attrs.evolve(batch, step=step.number if schedule.stream_mini_batches else None)
        if index is None:
            return batch
        step.groups[index] = list(batch.by_group())
        for partition, each in self._mixed.items():
            if more := further_groups(each.ratio, step.number * len(step.sizes) + index, len(step.groups[index])):
                which: dict[str, Any] = {"step": step.number, "fresh": {TRAIN: False, MADE: None}.get(partition, True)}
                batch = batch.joined(await queue.lease(_consumer(partition), more, deadline_seconds=seconds, **which))
        return batch

    async def _lease_any(self, step: Step) -> BatchMeta:
        """Lease any complete groups, as many as a batch has. Drop those that are too stale, unless they may be used."""
        queue, schedule, config = self.role.queue, self.role.schedule, self.role.config
        groups, bound = config.data.groups_per_batch, schedule.staleness_bound
        which: dict[str, Any] = {"step": step.number, "deadline_seconds": config.deadlines.batch}
        last = bound if schedule.on_stale == "wait" else schedule.steps  # nothing is waited for
        while True:
            batch = await queue.lease(CONSUMER, groups, max_staleness=last, **which)
            late = [at for at, tags in enumerate(batch.tags) if step.number - tags["weight_version_min"] > bound]
            if stale := batch.select(late):
                _count_stale(step, stale)
            if not stale or schedule.on_stale == "train_corrected":
                return batch
            await queue.release(batch)
            reason = f"its oldest weights are more than {bound} steps old at step {step.number}"
            await queue.drop_groups(list(stale.by_group()), reason, counts=False)


def _count_stale(step: Step, stale: BatchMeta) -> None:
    """Count samples that are beyond the bound, also by length and by task."""
    for tags in stale.tags:
        length = 1 << max(int(tags["response_tokens"]) - 1, 0).bit_length()
        for name in ("stale/samples", f"stale/samples/to_{length}_tokens", f"stale/tasks/{tags['task']}"):
            step.metrics[name] = step.metrics.get(name, 0.0) + 1.0


def mean_metrics(found: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, float]:
    """Return the weighted mean of each metric; of those named min and max the extreme."""
    result: dict[str, float] = {}
    for name in dict.fromkeys(name for _, metrics in found for name in metrics):
        values = [(weight, metrics[name]) for weight, metrics in found if name in metrics]
        extreme: Any = {"min": min, "max": max}.get(name.rpartition("/")[2])
        mean = sum(weight * value for weight, value in values) / sum(weight for weight, _ in values)
        result[name] = extreme(value for _, value in values) if extreme and len(values) > 1 else mean
    return result


def further_groups(ratio: float, step: int, own: int) -> int:
    """Return how many groups to mix into a batch, so that the ratio holds over all steps."""
    each = own * Fraction(str(ratio))
    return floor((step + 1) * each) - floor(step * each)


def _consumer(partition: str) -> str:
    return CONSUMER if partition == TRAIN else f"{CONSUMER}/{partition}"


def finite(update: Mapping[str, float], loss: str, step: Step, optimizer: OptimizerSpec) -> Mapping[str, float]:
    """Refuse an update whose loss or gradient norm is not finite, or leave these out if it was to be skipped."""
    skips = optimizer.on_nonfinite == "skip"
    if skips and not isfinite(update["grad_norm"]):
        return {name: value for name, value in update.items() if isfinite(value)} | {"updates_skipped": 1.0}
    for name in (loss, "grad_norm"):
        if not isfinite(update[name]):
            details = {"where": f"step {step.number + 1}", "expected": "a finite number", "found": update[name]}
            fix = "lower optimizer.lr or optimizer.clip_grad, or look at the rewards"
            raise RunError(f"{name} is {update[name]}", code="run.not-finite", fix=fix, **details)
    return {**update, "updates_skipped": 0.0} if skips else update
