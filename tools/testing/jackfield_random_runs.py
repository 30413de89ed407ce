"""Random short runs with random faults, for the tests and the benchmark of the simulator."""

from __future__ import annotations

import random
from typing import Any

import attrs

from jackfield.config.schedule import ScheduleConfig
from jackfield.simulation import FAULTS, PHASES, ROLES, Fault, SimulationSettings, Times

#: What is drawn of a schedule, so far as it has these settings.
_SCHEDULE: dict[str, tuple[Any, ...]] = {
    "sync_interval": (1, 1, 2, 3),
    "sync_offset": (0, 1, 2),
    "mode": ("sync", "sync", "async"),
    "max_staleness": (2, 3, 4),
    "on_stale": ("wait", "train_corrected", "drop"),
    "stream_mini_batches": (False, True),
    "rollouts_in_flight": (None, None, 1, 5),
}
_ASYNC_ONLY, _SYNC_ONLY = ("max_staleness", "on_stale"), ("sync_offset", "stream_mini_batches")
_TIMES: tuple[Any, ...] = (0.0, 2.0, {"uniform": (1.0, 20.0)}, {"lognormvariate": (1.5, 1.0)}, (0.5, 0.5, 30.0))

_LATE = (1.0, 20.0, 100.0)


def random_settings(seed: int, *, faults: int = 4) -> SimulationSettings:
    """Return a run of a few steps under a random schedule, with one to ``faults`` faults."""
    draw = random.Random(f"run {seed}")
    known = {field.name for field in attrs.fields(ScheduleConfig)}
    schedule = {name: draw.choice(values) for name, values in _SCHEDULE.items() if name in known}
    for name in _SYNC_ONLY if schedule.get("mode") == "async" else _ASYNC_ONLY:
        schedule.pop(name, None)
    run = {
        "schedule": {**schedule, "steps": draw.randint(3, 6), "max_retries": 12},
        "reward_service": {"retries": draw.randint(0, 1), "keep": False},
        "data": {"groups_per_batch": draw.randint(2, 4), "rollouts_per_group": draw.randint(1, 2)},
        "algorithm": {"epochs": draw.choice((1, 1, 2))},
        "checkpoint": {"every": draw.choice((1, 2, 3, 3))},
        "queue": {"durable": draw.random() < 0.5, "max_samples": draw.choice((None, None, 8))},
        "deadlines": {"batch": 1000.0, "rollout": 300.0, "reward": 100.0},
    }
    shared, replicas = draw.random() < 0.5, draw.choice((1, 1, 2, 3))
    ahead = schedule["mode"] == "async" or schedule["sync_interval"] > 1 or schedule.get("sync_offset", 0) > 0
    run["schedule"]["partial_rollout"] = ahead and shared and draw.random() < 0.7
    run["weights"] = {"in_turns": not shared and draw.random() < 0.7}
    # a replica in a cluster that dies too often lets the run recover; others end it
    name, restarts = draw.choice((("inline", faults), ("ray", faults), ("ray", 0)))
    run["cluster"] = {"name": name, "replicas": replicas, "replica_restarts": restarts}
    run["cluster"]["offload"] = shared and draw.random() < 0.3
    fewest = 2 if schedule.get("stream_mini_batches") else 1
    run["algorithm"]["mini_batches"] = draw.randint(fewest, run["data"]["groups_per_batch"])
    return SimulationSettings(
        run=run,
        times=Times(
            generate=draw.choice(_TIMES),
            reward=draw.choice(_TIMES),
            log_probs=draw.choice((0.0, 0.0, 1.0)),
            update=draw.choice((0.0, 2.0, 6.0, 6.0)),
            sync=draw.choice((0.0, 1.0, 10.0)),
            load=draw.choice((0.0, 0.0, 2.0)),
            start=draw.choice((0.0, 10.0)),
            checkpoint=draw.choice((0.0, 1.0)),
        ),
        faults=[random_fault(draw) for _ in range(draw.randint(min(1, faults), faults))],
        shared=shared,
        explorers=draw.choice((1, 1, 2)),
        slots=draw.choice((100, 100, 3)),
        keeps=draw.random() < 0.5,
        distributed=draw.random() < 0.5,
        failing=draw.choice((0.0, 0.0, 0.1)),
    )


def random_fault(draw: random.Random) -> Fault:
    """Return a fault of any role in any phase."""
    role, phase, kind = map(draw.choice, (ROLES, PHASES, FAULTS))
    at = draw.randint(1, 16 if phase in ("generate", "reward") else 4)
    return Fault(role=role, phase=phase, kind=kind, at=at, number=draw.randint(0, 1), seconds=draw.choice(_LATE))
