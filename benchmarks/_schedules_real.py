"""A real run of a workload under a plan, in seconds that are scaled, with plugins that sleep."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import _schedules_plugins as plugins
from _schedules_bound import Plan, Workload
from _vs_trl_task import VOCABULARY, make_tokenizer

from jackfield.compose import run
from jackfield.config import make_config
from jackfield.data.tasks import SeededOrder
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded

SEED = 7


class Ends:
    """Records when steps end."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.metrics: list[dict[str, float]] = []

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        self.at.append(time.monotonic())
        self.metrics.append(dict(event.metrics))

    def per_step(self, window: tuple[int, int]) -> float:
        """Return the seconds per step between the ends of two steps."""
        first, last = window
        return (self.at[last - 1] - self.at[first - 1]) / (last - first)


def settings(work: Workload, plan: Plan, steps: int) -> dict[str, Any]:
    """Return what a run of the plan has, whether it is simulated or not."""
    schedule: dict[str, Any] = {
        "steps": steps,
        "sync_interval": plan.k,
        "sync_offset": plan.o,
        "stream_mini_batches": plan.streams,
    }
    if plan.staleness is not None:
        schedule |= {"mode": "async", "max_staleness": plan.staleness}
    if work.tail:  # stragglers count as rollouts in flight for so many batches
        schedule["rollouts_in_flight"] = work.groups * work.rollouts * (2 + int(work.tail / work.generate))
    algorithm: dict[str, Any] = {"name": plan.algorithm, "mini_batches": work.mini_batches}
    return {
        "seed": SEED,
        "data": {"groups_per_batch": work.groups, "rollouts_per_group": work.rollouts},
        "algorithm": algorithm | ({"old_log_probs": "engine"} if work.log_probs else {}),
        "schedule": schedule,
        "checkpoint": {"every": 0, "at_end": False},
        "log_prob_check": {"every": 0, "probe_tokens": 0},
        "observe": {"samples_per_step": 0},
    }


def really_run(work: Workload, plan: Plan, steps: int, scale: float, folder: Path) -> Ends:
    """Run the plan; seconds are those of the workload, divided by ``scale``."""
    write_task(work, steps, folder)
    own = {"name": plugins.NAME, "workload": work.name, "scale": scale}
    cores = os.cpu_count() or 1
    values = settings(work, plan, steps) | {
        "name": f"{work.name}, {plan.name}",
        "folder": str(folder / "run"),
        "model": {"path": str(folder / "model")},
        "cluster": {"threads": cores if work.shared else 1},  # threads decide whether both sides share a device
        **dict.fromkeys(("engine", "rollout", "reward"), own),
    }
    values["data"] |= {"train": str(folder / "tasks.jsonl")}
    ends = Ends()
    with (folder / "output.txt").open("w") as output, contextlib.redirect_stderr(output):
        run(make_config(values, ()), hooks=[ends], registry=plugins.registry())
    return ends


def write_task(work: Workload, steps: int, folder: Path) -> None:
    """Write tasks, of which the last one of each batch has a long prompt, and a model's folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(folder / "model")
    described = {"vocab_size": VOCABULARY, "max_position_embeddings": 128, "model_type": "qwen3"}
    (folder / "model" / "config.json").write_text(json.dumps(described))
    count = work.groups * steps
    lines, order = [""] * count, SeededOrder(size=count, seed=SEED)
    for position in range(count):
        slow = work.tail > 0 and position % work.groups == work.groups - 1
        question = "I want to hear about birds now " * 2 if slow else "name birds"
        lines[order.index(position)] = json.dumps({"question": question, "answer": "b"}) + "\n"
    (folder / "tasks.jsonl").write_text("".join(lines))
