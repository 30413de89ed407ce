"""Rewards: the cost of a score, whether it stays flat, and the time to the last reward against its bound.

    python benchmarks/rewards.py [--scores 1000 3000 10000] [--scale 10] [--limit 500] [--repeat 3] [--quick] [--json]

Each score waits for 1 to 40 s divided by ``--scale``, drawn anew for each from a seed, and does nothing else.

``service``: a reward whose ``compute_score`` is a coroutine, behind the reward service in this process. ``worker``: the
same behind a reward worker, with the samples of whole groups read from and written to a queue's backend. ``function``:
a coroutine function of a file, in a worker process of the plugin ``function``, behind the reward service.

Processor time is that of this process and its children, less that of as many bare coroutines that wait as long (a call
of the clock each, behind a semaphore where there is a limit), divided by the number of scores. The bound of the time to
the last reward is that of the same waits begun in the same order, ``--limit`` at a time, with nothing between them.
``share`` is bound / time. The collector of garbage has the thresholds of Jackfield's own processes. ``--quick`` shows
that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.compose.rewards import make_reward
from jackfield.config import make_config
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.imports import own_process
from jackfield.plugins import installed
from jackfield.runtime.reward_service import RewardService

GROUP = 8
_FUNCTION = """
import asyncio

async def compute_score(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(extra_info["seconds"])
    return 1.0
"""


@attrs.frozen
class Measured:
    """The result of one measurement."""

    kind: str
    scores: int
    limit: int | None
    microseconds: float  #: of processor time per score, without that of the waits
    seconds: float  #: to the last reward
    bound: float

    @property
    def share(self) -> float:
        """Bound divided by time."""
        return self.bound / self.seconds


class Waits(RewardAgent):
    """Waits as long as a request says."""

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Wait, and return a score of 1."""
        await self.context.clock.sleep(request.extra_info["seconds"])
        return ScoreResult(score=1.0)


def cpu() -> float:
    """The processor time of this process and its children that have ended, in seconds."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def requests(waits: Sequence[float]) -> list[ScoreRequest]:
    """The requests of whole groups, with a deadline that none reaches."""
    return [
        ScoreRequest(
            data_source="benchmark",
            solution_str=f"answer {number}",
            ground_truth="",
            extra_info={"seconds": seconds},
            idempotency_key=f"train/0/{number // GROUP}/0/{number % GROUP}/0",
            group_id=f"train/0/{number // GROUP}/0",
            deadline_seconds=600.0,
        )
        for number, seconds in enumerate(waits)
    ]


async def bare(waits: Sequence[float], limit: int | None) -> None:
    """Wait as long, with nothing around it but a semaphore where there is a limit."""
    clock, turns = Clock(), nullcontext() if limit is None else asyncio.Semaphore(limit)

    async def wait(seconds: float) -> None:
        async with turns:
            await clock.sleep(seconds)

    await asyncio.gather(*map(wait, waits))


async def score_all(service: RewardService, waits: Sequence[float]) -> None:
    """Score all requests at once."""
    results = await asyncio.gather(*map(service.compute_score, requests(waits)))
    assert all(each.score == 1.0 for each in results), [each for each in results if each.score != 1.0][:3]


async def by_service(
    waits: Sequence[float], settings: RewardServiceConfig, folder: Path
) -> Callable[[], Awaitable[Any]]:
    """The service around a coroutine."""
    clock = Clock()
    service = RewardService(Waits(None, RewardContext(clock=clock)), settings, clock)
    return lambda: score_all(service, waits)


async def by_function(
    waits: Sequence[float], settings: RewardServiceConfig, folder: Path
) -> Callable[[], Awaitable[Any]]:
    """The plugin ``function``, whose process ends with the measurement so that its time is known."""
    file = folder / "waiting.py"
    file.write_text(_FUNCTION)
    chosen = {"path": f"{file}:compute_score"}
    service = make_reward(installed(), "function", chosen, settings, RewardContext())
    await service.start()

    async def run() -> None:
        await score_all(service, waits)
        await service.close()

    return run


async def by_worker(
    waits: Sequence[float], settings: RewardServiceConfig, folder: Path
) -> Callable[[], Awaitable[Any]]:
    """The reward worker, which reads samples and writes their rewards."""
    import torch

    from jackfield.abc.transfer_queue import TransferQueueContext
    from jackfield.queue import Values
    from jackfield.queue.values import MemoryBackend, MemoryConfig
    from jackfield.runtime.rewards import RewardJob, RewardWorker
    from jackfield.sdk.cells import column_from_rows, json_column

    clock, backend = Clock(), MemoryBackend(MemoryConfig(), TransferQueueContext())
    await backend.start()
    values, asked, tokens = Values(backend), requests(waits), torch.arange(16)
    keys, rows = [each.idempotency_key for each in asked], column_from_rows([tokens] * len(asked))
    task = {"data_source": "", "ground_truth": "", "reward": None}
    columns = {"prompt_ids": rows, "response_ids": rows}
    columns["response_mask"] = column_from_rows([torch.ones(16, dtype=torch.bool)] * len(asked))
    columns["task"] = json_column([{**task, "extra_info": dict(each.extra_info)} for each in asked])
    await values.put("train", keys, columns)
    plain = {"model": {"path": "none"}, "deadlines": {"reward": 600.0}}
    config = attrs.evolve(make_config(plain), reward_service=settings)
    service = RewardService(Waits(None, RewardContext(clock=clock)), settings, clock)
    worker = RewardWorker(values, service, _Letters(), clock, config)  # type: ignore[arg-type]
    jobs = [RewardJob(tuple(keys[at : at + GROUP])) for at in range(0, len(keys), GROUP)]

    async def run() -> None:
        done = 0
        async for report in worker.reward("train", jobs):
            done += len(report.results)
        assert done == len(keys)

    return run


class _Letters:
    """A tokenizer with one token per letter."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens."""
        return "".join(map(chr, token_ids))


KINDS = {"service": by_service, "worker": by_worker, "function": by_function}


def bound_of(waits: Sequence[float], limit: int | None) -> float:
    """The end of the last wait, if the next one begins whenever one of ``limit`` ends."""
    ends = [0.0] * (limit or len(waits))
    for seconds in waits:
        heapq.heapreplace(ends, ends[0] + seconds)
    return max(ends)


def measure(kind: str, scores: int, limit: int | None, scale: float, folder: Path) -> Measured:
    """Measure in a fresh event loop."""
    drawn = random.Random(scores)
    waits = [drawn.uniform(1.0, 40.0) / scale for _ in range(scores)]
    settings = RewardServiceConfig(concurrency=limit, keep=False)

    async def timed(work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        began, used = time.perf_counter(), cpu()
        await work()
        return time.perf_counter() - began, cpu() - used

    async def main() -> tuple[float, float]:
        return await timed(await KINDS[kind](waits, settings, folder))

    _, least = asyncio.run(timed(lambda: bare(waits, limit)))
    seconds, used = asyncio.run(main())
    return Measured(kind, scores, limit, (used - least) / scores * 1e6, seconds, bound_of(waits, limit))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scores", type=int, nargs="+", default=None)
    parser.add_argument("--scale", type=float, default=None)
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--repeat", type=int, default=None, help="the least of so many, as other work only adds")
    parser.add_argument("--kind", choices=list(KINDS), nargs="+", default=list(KINDS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    own_process()
    sizes = asked.scores or ([64, 128] if asked.quick else [1000, 3000, 10000])
    scale, repeat = asked.scale or (200.0 if asked.quick else 10.0), asked.repeat or (1 if asked.quick else 3)
    found = list[Measured]()
    with tempfile.TemporaryDirectory() as folder:
        for kind in asked.kind:
            for size, limit in [*((size, None) for size in sizes), (sizes[-1], asked.limit)]:
                tried = [measure(kind, size, limit, scale, Path(folder)) for _ in range(repeat)]
                cost, last = min(each.microseconds for each in tried), min(each.seconds for each in tried)
                found.append(attrs.evolve(tried[0], microseconds=cost, seconds=last))
                if not asked.json:
                    show(found[-1])
    if asked.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0], "scale": scale}
        print(json.dumps({**about, "results": [{**attrs.asdict(each), "share": each.share} for each in found]}))
    sys.stdout.flush()


def show(each: Measured) -> None:
    """Print a line."""
    limit = "no limit" if each.limit is None else f"{each.limit} at a time"
    times = f"{each.seconds:.2f} s to the last, bound {each.bound:.2f} s, share {each.share:.3f}"
    print(f"{each.kind:9} {each.scores:6} scores, {limit:15} {each.microseconds:7.1f} µs per score, {times}")


if __name__ == "__main__":
    main()
