"""Workloads and plans of ``schedules.py``, and the least time that a plan leaves: an analytic critical path.

Two things bound a step from below, whatever a scheduler does:

* *Precedence.* A batch starts after the version that its plan asks for, and after the batch before it on the rollout
  device; a sample's reward starts when its rollout ends; an update starts when its groups have rewards and the update
  before it has ended; a sync follows the last update of its step. The longest path through these nodes is found by one
  pass over the steps, in which every node starts at the latest end of what it waits for (max-plus).
* *Load.* A device works for the sum of the stages that occupy it: rollouts and syncs the rollout device; log-probs,
  updates and syncs the training device; all of them a shared one.

The bound is the larger one. It knows no queue, no lease, no message and no limit of rollouts in flight, and its order
of stages on a device is free where the plan leaves it free, so a real run cannot be faster.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Workload:
    """Stage times in seconds for one batch, and the seed's figures."""

    name: str
    groups: int = 8
    rollouts: int = 4  #: per group
    mini_batches: int = 1
    generate: float  #: seconds that a batch occupies the rollout device
    at_once: bool = False  #: whether its rollouts all take that long, side by side; else one ends after the other
    tail: float = 0.0  #: further seconds of each batch's last group, in which it occupies no device
    reward: tuple[float, float] | None = None  #: the bounds of a sample's reward, drawn uniformly; None: no time
    log_probs: float = 0.0
    update: float  #: of the whole batch
    sync: float
    shared: bool = False  #: whether rollouts and training share one device

    def reward_seconds(self, batch: int, group: int, rollout: int) -> float:
        """Return the time of a sample's reward, which is the same under every plan."""
        draw = random.Random(f"{self.name}/{batch}/{group}/{rollout}")
        return draw.uniform(*self.reward) if self.reward else 0.0


@attrs.frozen(kw_only=True)
class Plan:
    """A schedule by its settings, and the seed's figure for it, by workload."""

    name: str
    k: int = 1  #: ``schedule.sync_interval``
    o: int = 0  #: ``schedule.sync_offset``
    streams: bool = False  #: ``schedule.stream_mini_batches``
    staleness: int | None = None  #: ``schedule.max_staleness`` of ``mode: async``; None: ``mode: sync``
    algorithm: str = "grpo"

    @property
    def bound(self) -> int:
        """The largest staleness in steps."""
        return self.k - 1 + self.o if self.staleness is None else self.staleness

    def version(self, batch: int) -> int:
        """Return the oldest version with which a batch may start."""
        return max(0, math.ceil((batch - self.bound) / self.k) * self.k)


#: One shared device. The seed gives 160 s steps and the delay. Of the 120 s of computation it does not say what is
#: what: this share makes the bound of the pipeline alone about what the seed measured.
RECIPE = Workload(
    name="recipe",
    groups=32,
    rollouts=8,
    mini_batches=4,
    generate=52.0,
    at_once=True,
    reward=(1.0, 40.0),
    log_probs=14.0,
    update=48.0,
    sync=6.0,
    shared=True,
)
RECIPE_PLANS: dict[Plan, float] = {
    Plan(name="baseline"): 0.0,
    Plan(name="update pipeline", streams=True): -12.0,
    Plan(name="one-step", o=1): -24.7,
    Plan(name="both", o=1, streams=True): -30.4,
    Plan(name="both, decoupled PPO", o=1, streams=True, algorithm="decoupled_ppo"): -30.4,
}
OTHER_MODELS = (-28.44, -23.78, -23.08)  #: the seed's savings by both, with the other models and backends
_SEPARATE: Sequence[Workload] = (
    # Rollouts of 1.5B on 2 of 8 GPUs are slower than training on 6; of 7B training is slower.
    Workload(name="GSM8K 1.5B", generate=13.8, update=4.8, sync=4.7),
    Workload(name="GSM8K 7B", generate=15.8, update=22.5, sync=2.2),
    Workload(name="ALFWorld batch 32", generate=203.0, tail=85.0, update=53.0, sync=8.0),
    # The barrier of 186 s at each sync: a straggler of 171 s, an update of 7 s (an eighth of batch 32's), the sync.
    Workload(name="ALFWorld batch 4", groups=4, generate=20.1, tail=171.0, update=7.0, sync=8.0),
)
TRINITY_PLANS: Sequence[Plan] = (
    Plan(name="k=1"),
    Plan(name="k=2", k=2),
    Plan(name="k=10", k=10),
    Plan(name="offset 1", o=1),
    Plan(name="async", k=10, staleness=30),
)
TRINITY: dict[Workload, Sequence[float]] = dict(
    zip(
        _SEPARATE,
        (
            (1.0, 1.24, 1.59, 1.25, 1.61),
            (1.0, 1.31, 1.85, 1.69, 1.63),
            (1.0, 1.13, 1.59, 1.14, 1.65),
            (1.0, 1.70, 5.21, 0.98, 5.45),
        ),
        strict=True,
    )
)


def step_ends(work: Workload, plan: Plan, steps: int) -> list[float]:
    """Return the earliest end of each step, syncs included, by precedence alone."""
    published, ends = {0: 0.0}, list[float]()
    generated, device, trained = 0, 0.0, 0.0
    groups: list[list[tuple[float, float]]] = []  # by batch and group: when its rollouts end, when it has its rewards
    used: list[float] = []
    for step in range(steps):
        while generated < steps and (needed := plan.version(generated)) in published:
            start = max(device, published[needed])
            device = start + work.generate
            groups.append([_group(work, generated, index, start) for index in range(work.groups)])
            generated += 1
        if plan.staleness is None:
            trained = _trained(work, plan, trained, groups[step])
        else:
            used = sorted(rewarded for batch in groups for _, rewarded in batch)
            trained = max(trained, used[(step + 1) * work.groups - 1]) + work.log_probs + work.update
        if (step + 1) % plan.k == 0:
            trained += work.sync
            published[step + 1] = trained
        ends.append(trained)
    return ends


def _group(work: Workload, batch: int, index: int, start: float) -> tuple[float, float]:
    """Return when a group's rollouts end, and when it has its rewards."""
    last = index == work.groups - 1
    ended = start + work.generate * (1.0 if work.at_once else (index + 1) / work.groups) + work.tail * last
    return ended, ended + max(work.reward_seconds(batch, index, rollout) for rollout in range(work.rollouts))


def _trained(work: Workload, plan: Plan, free: float, groups: Sequence[tuple[float, float]]) -> float:
    """Return when a batch's updates end, if the training device is free from then on."""
    rewarded = sorted(rewarded for _, rewarded in groups)
    if not plan.streams:
        return max(free, rewarded[-1]) + work.log_probs + work.update
    at = max(free, *(ended for ended, _ in groups)) + work.log_probs if work.log_probs else free
    for part in range(work.mini_batches):
        ready = rewarded[(part + 1) * work.groups // work.mini_batches - 1]
        at = max(at, ready) + work.update / work.mini_batches
    return at


def load(work: Workload, plan: Plan) -> float:
    """Return the seconds per step that the busiest device works."""
    trains, syncs = work.log_probs + work.update, work.sync / plan.k
    if work.shared:
        return work.generate + trains + syncs
    return max(work.generate, trains) + syncs


def bound(work: Workload, plan: Plan, window: tuple[int, int]) -> float:
    """Return the least seconds per step between the ends of two steps, given as numbers of completed steps."""
    first, last = window
    ends = step_ends(work, plan, last + plan.bound + 1)  # later batches may overtake a straggler
    return max((ends[last - 1] - ends[first - 1]) / (last - first), load(work, plan))


def seeds_schedule(work: Workload, plan: Plan) -> float:
    """Return the seconds per step of Trinity's own scheduling, with which the stage times are checked.

    Its explorer waits for all of its rollouts before it loads weights, and the trainer waits for the explorer's sync.
    With an offset both work side by side between two syncs, and in its asynchronous mode they do not wait for each
    other.
    """
    slower, k = max(work.generate, work.update), plan.k
    if plan.staleness is not None:
        return max(k * work.generate + work.tail, k * work.update) / k + work.sync / k
    if plan.o:
        return max(work.generate + work.tail, work.update) + work.sync
    other = work.generate + work.update - slower
    return slower + (other + work.tail + work.sync) / k
