"""Predictions of a run's schedule, and of the schedules that it could have instead, from stage times."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.compose.checks import check_settings
from jackfield.compose.devices import describe_devices
from jackfield.config import RunConfig
from jackfield.config.schedule import UntilConfig
from jackfield.config.sections import CheckpointConfig, MixingConfig, QueueConfig
from jackfield.errors import JackfieldError, RunError
from jackfield.plugins import Registry
from jackfield.trainer.role import RoleName, Schedule
from jackfield_simulation import simulate
from jackfield_simulation.run import Simulation
from jackfield_simulation.settings import SimulationSettings, Times

STEPS = 8  #: that are measured by default
_SECONDS = 20.0  #: of processor time, of all simulations; so a plan does not depend on the load
_ROLLOUTS = 9_000  #: that are simulated in all; if there would be more, each group is simulated as one
_EQUAL = 1.01  #: of two step times that differ by less, the less stale schedule is better
_SEED = 0
_LIMITS = (None, 1.25, 1.5, 2.0, 3.0, 4.0)  #: of rollouts in flight, in batches, that asynchronous steps are tried with
#: The schedules that are tried, by name; other settings of a schedule are those of the file, or defaults.
SCHEDULES: Mapping[str, Mapping[str, Any]] = {
    "on-policy": {},
    "a sync every 2 steps": {"sync_interval": 2},
    "a sync every 4 steps": {"sync_interval": 4},
    "one step off-policy": {"sync_offset": 1},
    "update pipeline": {"stream_mini_batches": True},
    "update pipeline, one step off-policy": {"stream_mini_batches": True, "sync_offset": 1},
    "asynchronous, staleness 1": {"mode": "async", "max_staleness": 1},
    "asynchronous, staleness 2": {"mode": "async", "max_staleness": 2},
    "asynchronous, staleness 4": {"mode": "async", "max_staleness": 4},
}
_OF_ROLLOUT = ("generate", "environment", "reward")  #: stages, in order
_LANES = {"replicas": ("generate",), "engine": ("log_probs", "update", "sync"), "reward": ("reward",)}
_WAITS = {
    "trainer for rollouts": "waits/trainer/rollouts",
    "trainer for rewards": "waits/trainer/columns",
    "trainer for devices": "waits/train/devices",
    "rollouts for devices": "waits/rollout/devices",
    "explorer for weights": "seconds/wait_for_weights",
}
_KEPT = ("rollouts_in_flight", "partial_rollout", "steps", "until", "max_retries")


@attrs.frozen(kw_only=True)
class Prediction:
    """What a schedule does, in seconds per step if nothing else is said."""

    name: str
    settings: Mapping[str, Any]  #: that differ from those of the file
    placement: str
    step_time: float
    run_time: float  #: of all steps of the schedule, in seconds
    idle: Mapping[str, float]  #: share of the time, by lane
    waits: Mapping[str, float]
    staleness_bound: int
    staleness_mean: float
    staleness_max: float

    @property
    def in_flight(self) -> int:
        """Return the limit of rollouts in flight that differs from the file's; 0: none, or that of the default."""
        return self.settings.get("schedule.rollouts_in_flight") or 0

    @property
    def overrides(self) -> list[str]:
        """Return the settings as arguments of ``jackfield run``."""
        return [f"{name}={_yaml(value)}" for name, value in self.settings.items()]


@attrs.frozen(kw_only=True)
class Plan:
    """The predictions for a configuration, by step time, and the schedules that are left out."""

    own: Prediction
    others: Sequence[Prediction]
    left_out: Sequence[Mapping[str, str]]  #: name and reason
    notes: Sequence[str]

    @property
    def best(self) -> Prediction:
        """Return the least stale of the schedules that are as fast as the fastest."""
        all_of_them = [self.own, *self.others]
        limit = min(each.step_time for each in all_of_them) * _EQUAL
        fast = [each for each in all_of_them if each.step_time <= limit]
        return min(fast, key=_cost)


def make_plan(config: RunConfig, registry: Registry, times: Times, steps: int = STEPS, role: RoleName = "all") -> Plan:
    """Predict the schedule of a configuration and the others, within about 20 s.

    Raise what refuses the configuration itself (for a role), or ends its simulation.
    """
    if config.mode != "online":
        raise config.refusal("mode", "only training on rollouts has a schedule to plan", "online")
    until, left_out = time.process_time() + _SECONDS, list[Mapping[str, str]]()
    _, algorithm = check_settings(config, registry, role)
    candidates = list(_candidates(config))
    rollouts = config.data.rollouts_per_group + algorithm.greedy_baseline
    size = _Size.of(config, rollouts, (1 + len(candidates)) * (steps + 6))
    predict = partial(_predict, config, times=times, steps=steps, size=size)
    found = [(own := predict("this file", config, algorithm), config)]

    def attempt(name: str, other: RunConfig) -> None:
        try:
            if time.process_time() > until:
                raise RunError("the time for simulations ran out: use fewer --steps")
            found.append((predict(name, other, check_settings(other, registry, role)[1]), other))
        except JackfieldError as error:
            wanted = "" if error.expected is None else f"; expected: {error.expected}"
            left_out.append({"name": name, "reason": f"{error.message}{wanted}"})

    for name, other in candidates:
        attempt(name, other)
    limits = (
        _LIMITS if times.environment else _LIMITS[:1]
    )  # with more in flight, replicas that always work gain nothing
    for name, other in list(_limited(found, config.data.groups_per_batch * rollouts, limits)):
        attempt(name, other)
    others = sorted([each for each, _ in found[1:]], key=_order)
    notes = [*size.notes, *describe_devices(config, registry, role, algorithm)]
    return Plan(own=own, others=others, left_out=left_out, notes=notes)


def _cost(one: Prediction) -> tuple[int, ...]:
    """Return what equally fast schedules are compared by: age of tokens, then changes to the file."""
    return one.staleness_bound, round(one.staleness_mean), len(one.settings), one.in_flight


def _order(one: Prediction) -> tuple[float, int, int]:
    return round(one.step_time, 3), one.staleness_bound, one.in_flight


def _candidates(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    """Yield the schedules by name, on both placements if the file leaves it open."""
    placements: Any = ("shared", "separate") if config.cluster.placement is None else (config.cluster.placement,)
    kept = {name: getattr(config.schedule, name) for name in _KEPT}
    for name, settings in SCHEDULES.items():
        schedule = type(config.schedule)(**kept, **settings)
        scope = config.algorithm.scope if schedule.stream_mini_batches else "batch"
        algorithm = attrs.evolve(config.algorithm, scope=scope)
        for placement in placements:
            named = f"{name}, {placement}" if len(placements) > 1 else name
            cluster = attrs.evolve(config.cluster, placement=placement)
            other = attrs.evolve(config, cluster=cluster, schedule=schedule, algorithm=algorithm)
            if _does(other) != _does(config):
                yield named, other


def _limited(
    found: Sequence[tuple[Prediction, RunConfig]], batch: int, limits: Sequence[float | None]
) -> Iterator[tuple[str, RunConfig]]:
    """Yield the fastest asynchronous schedule, and the file's own, with other limits of rollouts in flight."""
    own, asynchronous = found[0][1], [pair for pair in found if pair[1].schedule.mode == "async"]
    chosen = sorted(asynchronous, key=lambda pair: _order(pair[0]))[:1]
    for prediction, config in chosen + [pair for pair in asynchronous if pair[1] is own and pair not in chosen]:
        now = config.schedule.rollouts_in_flight
        for limit in (None if factor is None else round(factor * batch) for factor in limits):
            if (limit or batch) != (now or batch):
                schedule = attrs.evolve(config.schedule, rollouts_in_flight=limit)
                named = f"{prediction.name}, {limit or batch} rollouts in flight"
                yield named, attrs.evolve(config, schedule=schedule)


def _does(config: RunConfig) -> tuple[object, ...]:
    """Return what is equal for schedules that do the same."""
    schedule = Schedule(**attrs.asdict(config.schedule, recurse=False))
    inactive = attrs.evolve(schedule, max_staleness=schedule.staleness_bound if schedule.is_async else None)
    return inactive, config.algorithm, config.cluster.shares_devices


@attrs.frozen
class _Size:
    """How much of a batch is simulated: its rollouts, or each group as one; all groups, or some."""

    groups: int
    rollouts: int
    whole_groups: bool
    notes: Sequence[str]

    @classmethod
    def of(cls, config: RunConfig, rollouts: int, steps: int) -> _Size:
        groups, most = config.data.groups_per_batch, _ROLLOUTS // steps
        if groups * rollouts <= most:
            return cls(groups, rollouts, False, ())
        some = min(groups, max(most, config.algorithm.mini_batches, 2))
        notes = [f"the {rollouts} rollouts of a group are simulated as one that takes as long as the last of them"]
        if some < groups:
            notes.append(f"{some} of {groups} groups per batch are simulated, which have fewer stragglers")
        return cls(some, rollouts, True, notes)

    def config(self, config: RunConfig, times: Times) -> RunConfig:
        """Return what is simulated; a group that is one rollout ends with its last one, and leaves no room before."""
        data = attrs.evolve(config.data, groups_per_batch=self.groups, rollouts_per_group=self.rollouts)
        if not self.whole_groups:
            return attrs.evolve(config, data=data)
        batch, spread = config.data.groups_per_batch * self.rollouts, self.spread(times, "generate", "environment")
        limit = (config.schedule.rollouts_in_flight or batch) / batch * self.groups * spread
        schedule = attrs.evolve(config.schedule, rollouts_in_flight=max(1, round(limit)))
        return attrs.evolve(config, data=attrs.evolve(data, rollouts_per_group=1), schedule=schedule)

    def slots(self, times: Times) -> int:
        """Return how many rollouts replicas generate at a time: as many as a batch has."""
        spread = self.spread(times, "generate") if self.whole_groups else self.rollouts
        return max(1, round(self.groups * spread))

    def spread(self, times: Times, *stages: str) -> float:
        """Return how much longer these stages of a group's last rollout take than those of the mean one."""
        places = [[(0, group, number) for number in range(self.rollouts)] for group in range(self.groups)]
        drawn = [[sum(times.draw(each, _SEED, *place) for each in stages) for place in group] for group in places]
        total = sum(map(sum, drawn))
        return sum(map(max, drawn)) * self.rollouts / total if total else 1.0

    def times(self, times: Times) -> Times:
        """Return times of groups: those of their last rollouts and scores."""
        if not self.whole_groups:
            return times

        @cache
        def ends(batch: int, group: int) -> dict[str, float]:
            """Return when the last rollout has been generated, leaves its environment, and is scored."""
            places = [(batch, group, number) for number in range(self.rollouts)]
            drawn = [[times.draw(each, _SEED, *at) for each in _OF_ROLLOUT] for at in places]
            last = [max(map(sum, (each[:count] for each in drawn))) for count in (1, 2, 3)]
            return dict(zip(_OF_ROLLOUT, (last[0], last[1] - last[0], last[2] - last[1]), strict=True))

        def duration(stage: str, batch: int, group: int, *_: object) -> float:
            return ends(batch, group)[stage]

        environment = duration if times.environment else 0.0
        return attrs.evolve(times, generate=duration, environment=environment, reward=duration)


def _predict(
    file: RunConfig,
    name: str,
    config: RunConfig,
    algorithm: ResolvedAlgorithm,
    *,
    times: Times,
    steps: int,
    size: _Size,
) -> Prediction:
    """Simulate a schedule and measure ``steps`` of it, between a warm-up and steps that keep the explorer busy."""
    schedule = Schedule(**attrs.asdict(config.schedule, recurse=False))
    bound, interval = schedule.staleness_bound, schedule.sync_interval
    warm, measured = (-(-count // interval) * interval for count in (bound + 1, steps))
    run = _simulated(config, algorithm, times, warm + measured + bound + 1, size)
    starts = _starts(run)
    begin, end = starts[warm], starts[warm + measured]
    step_time = (end - begin) / measured
    metrics = [run.steps[number + 1] for number in range(warm, warm + measured)]
    return Prediction(
        name=name,
        settings=_changed(file, config),
        placement="shared" if config.cluster.shares_devices else "separate",
        step_time=step_time,
        run_time=step_time * config.schedule.steps + max(0.0, begin - warm * step_time),
        idle=_idle(run, begin, end),
        waits={who: sum(step.get(each, 0.0) for step in metrics) / measured for who, each in _WAITS.items()},
        staleness_bound=bound,
        staleness_mean=sum(step.get("staleness/mean", 0.0) for step in metrics) / measured,
        staleness_max=max(step.get("staleness/max", 0.0) for step in metrics),
    )


def _simulated(config: RunConfig, algorithm: ResolvedAlgorithm, times: Times, steps: int, size: _Size) -> Simulation:
    config = size.config(config, times)
    small = attrs.evolve(
        config,
        schedule=attrs.evolve(config.schedule, steps=steps, until=UntilConfig()),
        checkpoint=CheckpointConfig(every=0),
        queue=QueueConfig(),
        mixing=MixingConfig(),
        profile=None,
    )
    plain = attrs.evolve(algorithm, dynamic_sampling=False, greedy_baseline=False, experts=0)
    shared = config.cluster.shares_devices
    settings = SimulationSettings.of_config(
        small, size.times(times), algorithm=plain, shared=shared, slots=size.slots(times), workers=1, deadline=1e9
    )
    try:
        return simulate(settings, seed=_SEED, tries=0)
    except RunError as error:  # what ended it says more, such as a deadline of the configuration
        raise error.__cause__ or error from None


def _starts(run: Simulation) -> dict[int, float]:
    """Return when each step began to take its batch."""
    starts = dict[int, float]()
    for stage in run.stages:
        if stage.name == "next_batch":
            starts.setdefault(stage.step, stage.start)
    return starts


def _idle(run: Simulation, begin: float, end: float) -> dict[str, float]:
    """Return for what share of a time each lane had nothing to do."""
    spans = {
        lane: [(start, stop) for stage, start, stop, _ in run.spans if stage in stages]
        for lane, stages in _LANES.items()
    }
    spans["explorer"] = [(each.start, each.end) for each in run.stages if each.name == "rollout"]
    return {lane: 1.0 - _covered(own, begin, end) / max(end - begin, 1e-9) for lane, own in spans.items()}


def _covered(spans: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    covered, until = 0.0, begin
    for start, stop in sorted(spans):
        start, stop = max(start, until), min(stop, end)
        covered += max(0.0, stop - start)
        until = max(until, stop)
    return covered


def _changed(file: RunConfig, config: RunConfig) -> dict[str, Any]:
    """Return the settings that a candidate has and the file has not."""
    found = dict[str, Any]()
    for section in ("schedule", "algorithm", "cluster"):
        before, after = getattr(file, section), getattr(config, section)
        for name in ("placement",) if section == "cluster" else [each.name for each in attrs.fields(type(after))]:
            if name != "until" and getattr(before, name) != getattr(after, name):
                found[f"{section}.{name}"] = getattr(after, name)
    return found


def _yaml(value: Any) -> str:
    return (
        {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    )
