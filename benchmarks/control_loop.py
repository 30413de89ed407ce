"""What the control loop costs: milliseconds of a step in which agents, rewards, engine and weights take no time.

    python benchmarks/control_loop.py [--cluster inline ray distributed] [--samples 256 1024] [--steps N] [--quick]
        [--virtual] [--replicas 1 256 1024] [--json]

Everything else is real: batches, groups, leases, placement, the queue with its values, workers and their messages.
With ``ray``, agent worker, reward worker and engine rank are actors of a cluster on this machine; with ``distributed``,
the queue's controller, the explorer and the rewards are processes beside the trainer, without Ray. In both, values are
in a storage unit of zmq. A sample has 15 prompt and 32 response tokens. ``--quick`` takes two steps,
unless ``--steps`` is given.

``--virtual`` measures the controller alone on virtual time, in steps of about 60 s with 64 engine ranks, 64 agent
workers and ``--samples`` (by default 16,384): the processor time of the trainer's process, without that of the workers.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import _control_loop_parts as parts
import _control_loop_virtual as virtual

from jackfield.errors import JackfieldError
from jackfield.runtime.engine import EngineGroup
from jackfield.trainer.rewards import RewardPipeline
from jackfield.trainer.role import Role
from jackfield.trainer.rollouts import Explorer
from jackfield.trainer.trainer import Trainer

CLUSTERS: dict[str, Any] = {"inline": parts.inline, "ray": parts.ray, "distributed": parts.distributed}


async def measure(role: Role) -> list[tuple[float, float]]:
    """Seconds of each step, and processor seconds of this process."""
    clock, steps = role.clock, role.config.schedule.steps
    actor = EngineGroup("actor", role.workers.ranks["actor"], role.queue, clock, seconds=parts.SECONDS)
    await actor.initialize()
    trainer = Trainer(role=role, actor=actor, sync=parts.sync)
    loops = []
    if role.name == "all":
        rewards = RewardPipeline(role=role)
        await rewards.register()
        loops = [Explorer(role=role, name="explorer-0").run, rewards.run]
    ends = [(clock.time(), time.process_time())]

    async def note() -> None:
        for done in range(1, steps + 1):
            await role.steps_done.until(lambda value, wanted=done: value >= wanted, parts.SECONDS, "a step")  # type: ignore[misc]
            ends.append((clock.time(), time.process_time()))

    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(loop()) for loop in loops]
        noting = tasks.create_task(note())
        await trainer.begin()
        await trainer.run()
        await noting
        for task in background:
            task.cancel()
    return [(end - begin, used - before) for (begin, before), (end, used) in itertools.pairwise(ends)]


async def run(cluster: str, sizes: Sequence[int], steps: int) -> dict[str, float]:
    """By the number of samples: the median milliseconds of a step, the first one left out."""
    found = {}
    for samples in sizes:
        async with AsyncExitStack() as stack:
            role = parts.role_of(samples, steps + 1, "train" if cluster == "distributed" else "all")
            await CLUSTERS[cluster](role, stack.enter_context(tempfile.TemporaryDirectory()), stack)
            times = zip(*(await measure(role))[1:], strict=True)
            milliseconds, own = (1000 * statistics.median(each) for each in times)
        print(
            f"{cluster:11}  {samples:6} samples  {milliseconds:8.1f} ms per step, {own:8.1f} ms of this process's "
            "processor time",
            flush=True,
        )
        found[str(samples)] = round(milliseconds, 2)
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cluster", nargs="*", default=["inline", "ray"], choices=list(CLUSTERS))
    parser.add_argument("--samples", nargs="+", type=int, help="default: 256 1024; with --virtual 16384")
    parser.add_argument("--steps", type=int, help="default: 20; with --quick 2")
    parser.add_argument("--quick", action="store_true", help="two steps, unless --steps is given")
    parser.add_argument("--virtual", action="store_true", help="only the controller's time, over replicas")
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 4, 16, 64, 256, 1024])
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    arguments = parser.parse_args()
    steps = (2 if arguments.quick else 20) if arguments.steps is None else arguments.steps
    samples = arguments.samples
    parts.import_torch()
    found: dict[str, Any] = {"overhead_ms_per_step": {}, "steps": steps}
    try:
        if arguments.virtual:
            curves = {
                each: virtual.curve(each, arguments.replicas, arguments.steps or min(steps, 5))
                for each in samples or [16_384]
            }
            found["controller_share_of_step"] = next(iter(curves.values()))
            found["controller_share_by_samples"] = curves
        for cluster in () if arguments.virtual else arguments.cluster:
            found["overhead_ms_per_step"][cluster] = asyncio.run(run(cluster, samples or [256, 1024], steps))
    except JackfieldError as error:
        sys.exit(str(error))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
