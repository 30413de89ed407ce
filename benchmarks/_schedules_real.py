"""A real run of a workload under a plan, in seconds that are scaled, with plugins that sleep."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

import _schedules_plugins as plugins
import attrs
from _schedules_bound import Plan, Workload
from _vs_trl_task import VOCABULARY, make_tokenizer

from jackfield.compose import run
from jackfield.compose.builder import Stop
from jackfield.config import make_config
from jackfield.data.tasks import SeededOrder
from jackfield.plugins import hookimpl
from jackfield.plugins.hooks import StepEnded

SEED = 7


@attrs.define(eq=False)
class Ends:
    """Records when steps end, and ends the run after the last one that counts."""

    stop: Stop
    last: int
    at: list[float] = attrs.field(factory=list)

    @hookimpl
    def step_ended(self, event: StepEnded) -> None:
        self.at.append(time.monotonic())
        if event.step >= self.last:
            self.stop.requested.set()


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
    algorithm["kl"] = {"initial_responses": 0}
    return {
        "seed": SEED,
        "data": {"groups_per_batch": work.groups, "rollouts_per_group": work.rollouts},
        "algorithm": algorithm | ({"old_log_probs": "engine"} if work.log_probs else {}),
        "schedule": schedule,
        "checkpoint": {"every": 0, "at_end": False},
        "log_prob_check": {"every": 0, "probe_tokens": 0},
        "observe": {"samples_per_step": 0},
    }


def really_run(work: Workload, plan: Plan, window: tuple[int, int], scale: float, folder: Path) -> float:
    """Run the plan with the workload's seconds divided by ``scale``; return the seconds per step of a window."""
    first, last = window
    steps = last + plan.bound + plan.k + 2  # rollouts of later steps compete for the devices until the end
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
    ends = Ends(Stop(60.0), last)
    with (folder / "output.txt").open("w") as output, contextlib.redirect_stderr(output):
        run(make_config(values, ()), hooks=[ends], registry=plugins.registry(), stop=ends.stop)
    return (ends.at[last - 1] - ends.at[first - 1]) / (last - first)


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
