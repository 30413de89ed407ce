"""Ranks of the tests with several: ``python worker.py ORDER.json`` runs checks of the conformance suite, and more.

All ranks do the same: an engine of several ranks keeps its contract as one of a single rank does. The process imports
Megatron-Core once and forks the ranks.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from jackfield.abc.engine import (
    BaseEngine,
    EngineContext,
    EngineLayout,
    EngineOutput,
    LoadCheckpointRequest,
    OptimizerSpec,
    SaveCheckpointRequest,
)
from jackfield.settings import structure
from jackfield_conformance.registry import Subject, checks, run_check
from jackfield_conformance.support import engine as support
from jackfield_engine_megatron.config import Config
from jackfield_engine_megatron.engine import MegatronEngine

torch.set_num_threads(1)

#: not OPTIMIZER of the suite: gradients of rounding errors alone do not move a weight
OPTIMIZER = OptimizerSpec(lr=1e-2, weight_decay=0.1, eps=1e-4)


@attrs.frozen(kw_only=True, eq=False)
class SpreadSubject(Subject):
    """A subject whose engines are one rank of several."""

    rank: int
    world_size: int

    def make(self, context: EngineContext, **settings: Any) -> Any:
        """Create this rank's part of the engine."""
        place = {"rank": self.rank, "local_rank": self.rank, "world_size": self.world_size}
        return super().make(attrs.evolve(context, **place), **settings)


def check(subject: SpreadSubject, name: str) -> str:
    """Run a check of the suite; return its problem, or nothing."""
    (found,) = [each for each in checks("engine") if each.id == name]
    folder = subject.folder / name
    folder.mkdir(exist_ok=True)
    outcome = run_check(found, subject.at(folder))
    return "" if outcome.status == "passed" else f"{name} {outcome.status}: {outcome.message}"


def round_trip(subject: SpreadSubject, folder: Path) -> str:
    """Load a folder, publish it and write it again: the same names and bits as the folder's own."""
    wanted = load_file(folder / "model.safetensors")
    dtype = str(next(iter(wanted.values())).dtype).removeprefix("torch.")
    written = subject.folder / f"written-{folder.name}"
    with support.opened(subject, folder, dtype=dtype) as engine:
        support.assert_same_tensors(wanted, support.weights(engine), f"published weights of {folder.name}")
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(written), format="huggingface"))
    support.assert_same_tensors(wanted, load_file(written / "model.safetensors"), f"the written {folder.name}")
    return ""


def same_as(subject: SpreadSubject, folder: Path, expected: Path) -> str:
    """Train three steps on this rank's rows: they are those of the engine fsdp on one process (``expected``)."""
    wanted = load_file(expected / "expected.safetensors")
    numbers = json.loads((expected / "expected.json").read_text())

    def kind(prefix: str) -> dict[str, torch.Tensor]:
        return {n.removeprefix(f"{prefix}:"): t for n, t in wanted.items() if n.startswith(f"{prefix}:")}

    options = {"micro_batch_tokens": support.SMALL, "optimizer": OPTIMIZER}
    native = str(subject.folder / f"native-{folder.name}")
    with support.opened(subject, folder, **options) as engine:
        for step in range(3):
            layout, gradients, output, norm = train(engine)
            loss = torch.tensor(output.loss if layout.is_output_rank else 0.0, dtype=torch.float64)
            if subject.world_size > 1:
                dist.all_reduce(loss)
            for what, found in (("loss", float(loss)), ("norm", norm)):
                target = numbers[what][step]
                assert abs(found - target) <= 1e-4 * abs(target), f"{what} {step} is {found}, expected {target}"
            if step == 0:
                rows = [wanted[f"log_probs:{index}"] for index in chosen_rows(layout)]
                support.assert_tokens(rows, output.log_probs, 1e-4, "log-probabilities")
                same = {name: gradients[name] for name in kind("gradient") if name in gradients}
                support.assert_close({name: kind("gradient")[name] for name in same}, same, 1e-4, "gradients")
                support.assert_close(kind("weight"), support.weights(engine), 1e-4, "weights after a step")
            if step == 1:
                engine.save_checkpoint(SaveCheckpointRequest(folder=native))
        after = support.weights(engine)
    with support.opened(subject, folder, **options) as engine:
        engine.load_checkpoint(LoadCheckpointRequest(folder=native))
        train(engine)
        support.assert_same_tensors(after, support.weights(engine), "weights of the step after a checkpoint was loaded")
    return ""


def chosen_rows(layout: EngineLayout) -> list[int]:
    """The rows of a data-parallel rank."""
    return list(range(len(support.LENGTHS)))[layout.data_parallel_rank :: layout.data_parallel_size]


def train(engine: BaseEngine) -> tuple[EngineLayout, dict[str, torch.Tensor], EngineOutput, float]:
    """A step on this rank's rows; its layout, gradients, output and gradient norm."""
    data = support.batch([support.make_rows()[index] for index in chosen_rows(engine.layout)])
    with engine.train_mode():
        engine.optimizer_zero_grad()
        output = engine.forward_backward_batch(data, support.Loss(entropy=0.1))
        gradients = support.held_gradients(engine)
        norm = engine.optimizer_step()
        engine.lr_scheduler_step()
    return engine.layout, gradients, output, norm


def play(order: dict[str, Any], rank: int) -> list[str]:
    """Carry out what the order names; return the problems."""
    warnings.simplefilter("error")
    size, folder = order["world_size"], Path(order["folder"])
    if size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=size)
    problems = []
    for number, job in enumerate(order["jobs"]):
        place = folder / f"job-{number}"
        place.mkdir(exist_ok=True)
        subject = SpreadSubject(
            kind="engine",
            name="megatron",
            cls=MegatronEngine,
            config=structure(Config, job["settings"]),
            config_class=Config,
            settings=job["settings"],
            folder=place,
            rank=rank,
            world_size=size,
        )
        for task, *arguments in job["tasks"]:
            function = {"check": check, "round_trip": round_trip, "same_as": same_as}[task]
            values = arguments if task == "check" else [Path(each) for each in arguments]
            try:
                problem = function(subject, *values)
            except Exception:
                problem = traceback.format_exc()[-3000:]
            if problem:
                problems.append(f"{job['settings']} {task} {arguments}: {problem}")
            if problem and size > 1:
                return problems  # the others may be elsewhere
    return problems


def fork(order: dict[str, Any], rank: int) -> int:
    """Start a rank in a child process; return its id."""
    if child := os.fork():
        return child
    code = 1
    try:
        problems = play(order, rank)
        print("\n".join(problems), end="", flush=True)
        code = 1 if problems else 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def main(order: dict[str, Any]) -> int:
    """Run all ranks; return how many failed. Once one has, the others have 5 seconds: they may wait for it."""
    gc.freeze()  # each engine collects garbage when it is closed, of what it made
    children = {os.pidfd_open(child): child for child in (fork(order, rank) for rank in range(order["world_size"]))}
    poll, failed = select.poll(), 0
    for descriptor in children:
        poll.register(descriptor, select.POLLIN)
    while children:
        ready = poll.poll(5000 if failed else None)
        for child in () if ready else children.values():
            os.kill(child, signal.SIGKILL)
        for descriptor, _ in ready:
            poll.unregister(descriptor)
            failed += bool(os.waitpid(children.pop(descriptor), 0)[1])
    return failed


if __name__ == "__main__":
    sys.exit(main(json.loads(Path(sys.argv[1]).read_text())))
