"""The settings of a simulation: those of the run, the durations of its stages, and faults."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.config import RunConfig, as_plain, make_config

#: Seconds; measured seconds to draw from; a method of :class:`random.Random` with its arguments, as in
#: ``{"uniform": [1, 40]}``; or a function of stage, batch (or step), group (or mini-batch), rollout and a generator.
Duration: TypeAlias = float | Sequence[float] | Mapping[str, Sequence[float]] | Callable[..., float]
ROLES = ("trainer", "explorer", "reward worker", "agent worker", "replica", "engine rank", "store unit", "controller")
PHASES = ("generate", "reward", "log_probs", "update", "sync", "checkpoint", "between")
FAULTS = ("dies", "freezes", "answers late", "answers twice")
_OFF: dict[str, Any] = {
    "log_prob_check": {"every": 0, "probe_tokens": 0},
    "evaluation": {"every": 0},
    "observe": {"samples_per_step": 0},
}


@attrs.frozen(kw_only=True)
class Times:
    """The durations of the stages. With one seed, a place has the same duration under every schedule."""

    generate: Duration = 10.0  #: of a rollout, in which a replica works for it
    environment: Duration = 0.0  #: of a rollout, after that: it waits for tools or an environment
    reward: Duration = 0.0  #: of a score
    log_probs: Duration = 0.0  #: of each inference pass over a batch
    update: Duration = 6.0  #: of a mini-batch
    sync: Duration = 1.0  #: of a weight sync, in all turns
    load: Duration = 0.0  #: for which a replica stands still to load weights
    start: Duration = 0.0  #: of a replica
    checkpoint: Duration = 0.0  #: of saving an engine

    def draw(self, stage: str, seed: int, *place: int, again: str = "") -> float:
        """Return the seconds of a stage at batch, group and rollout; ``again`` tells what is repeated there."""
        duration, draw = getattr(self, stage), random.Random(f"{seed}/{stage}/{place}/{again}")
        if callable(duration):
            return float(duration(stage, *place, draw))
        if isinstance(duration, Mapping):
            ((method, arguments),) = duration.items()
            return max(float(getattr(draw, method)(*arguments)), 0.0)
        return float(duration if isinstance(duration, int | float) else draw.choice(duration))


@attrs.frozen(kw_only=True)
class Fault:
    """What happens to a role when a phase begins for the ``at``-th time: the guide on simulation describes it."""

    role: str  #: one of ROLES
    phase: str  #: one of PHASES
    kind: str  #: one of FAULTS
    at: int = 1
    number: int = 0  #: of the worker, explorer or unit
    seconds: float = 20.0  #: by which an answer is late


@attrs.frozen(kw_only=True)
class SimulationSettings:
    """The settings of a simulated run."""

    run: Mapping[str, Any] = attrs.field(factory=dict)  #: those of the run, as in its file
    times: Times = Times()
    faults: Sequence[Fault] = ()
    shared: bool = False  #: whether engine and replicas take turns on the same devices
    explorers: int = 1
    workers: int = 2  #: agent workers, reward workers, and units of the store
    slots: int = 1 << 20  #: rollouts that a replica generates at a time
    tokens: int = 4  #: most tokens of a response
    keeps: bool = True  #: whether replicas keep the requests that are interrupted; otherwise routers continue them
    distributed: bool = False  #: whether trainer, explorers and controller are processes, which stand still alone
    failing: float = 0.0  #: share of the scores that fail
    deadline: float = 5000.0  #: virtual seconds within which each step has to end
    algorithm: ResolvedAlgorithm = attrs.field(
        default=ResolvedAlgorithm(loss="ppo", advantages="grpo", recompute_old_log_probs=True), repr=False
    )

    @classmethod
    def of_config(cls, config: RunConfig, times: Times, **others: Any) -> SimulationSettings:
        """Return the settings that simulate a run without its evaluations, checks of log-probs and sample tables."""
        return cls(run=as_plain(config), times=times, **others)

    def count(self, role: str) -> int:
        """Return the number of a role's members."""
        if role in ("trainer", "engine rank", "controller"):
            return 1
        replicas: int = self.run.get("cluster", {}).get("replicas", 1)
        return {"explorer": self.explorers, "replica": replicas}.get(role, self.workers)

    def config(self, folder: str) -> RunConfig:
        """Return the configuration of the run in a folder."""
        off = {name: {**self.run.get(name, {}), **section} for name, section in _OFF.items()}
        algorithm = self.run.get("algorithm", {})
        off["algorithm"] = {**algorithm, "kl": {**algorithm.get("kl", {}), "initial_responses": 0}}
        return make_config({"model": {"path": "none"}, **self.run, **off, "folder": folder})
