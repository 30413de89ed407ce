"""Agents: what the host of agent loops adds to a turn, and to the memory of a rollout, against bare coroutines.

    python benchmarks/agents.py [--rollouts 10 30 100 …] [--turns 8] [--repeat 3] [--quick] [--json] [--curve FILE.png]

An agent with the sequence builder asks the model, calls a tool, appends its result, and so on: a prompt of 200 tokens,
and per turn 50 tokens of the model and 20 of the tool's result. One agent worker runs all rollouts at once, as in a
run: with the router, a replica, the run's tools (a coroutine function), the checks of what the agent returns, and the
writing of all samples to a queue's backend in memory. Server and tool answer at once; the tokenizer is a table, as its
cost is its own.

The bare equivalent is a coroutine per rollout with the same server and the same tool, which appends the tokens to four
lists and ends.

All times are processor time of this process (:mod:`_processor_time`): what a worker would take that has a core for
itself. Other programs on the machine do not count, nor does the rounding of timers to whole milliseconds.

``µs per turn``: all of a run, divided by all turns; the median of the repetitions. ``ms, instant servers``: from the
end of one turn to the end of the next one of any rollout, which is what a turn costs a worker that always has another
one to do. ``ms, servers that take a second``: with servers that take 0.5 to 1.5 s, what a turn takes longer than server
and tool, as seen by the agent, with all rollouts begun at once: from the answer of the server to its next request.
``KiB per rollout``: what Python has allocated while each rollout waits for its last answer; with more than
3,000 rollouts it is not measured. ``--quick`` shows that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import attrs
from _agents_curve import draw
from _processor_time import now, run

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput, AgentWorkerContext, ToolCall
from jackfield.abc.rollout import GenerateRequest, GenerateResult, HealthReport
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.data.formats import Task
from jackfield.imports import collection_paused, own_process
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.routing import Replica, Router
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob
from jackfield.runtime.agents import AgentHost
from jackfield.sdk.sequences import SequenceBuilder, sequences_of

_SLEPT: ContextVar[list[float]] = ContextVar("slept")  #: what the server took for the turns of a rollout
GROUP = 8
PROMPT, ANSWER, RESULT = 200, 50, 20  #: tokens
SECONDS = 600.0
FEWEST = 1000  #: rollouts with instant servers; fewer are repeated
MOST_TRACED = 3000  #: rollouts whose memory is measured; tracing all allocations takes several times as long
_TOOL = '''
async def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
'''


class Tokenizer:
    """Returns the same tokens for all texts."""

    end_token_ids = (0,)
    prompt, result = tuple(range(1000, 1000 + PROMPT)), tuple(range(2000, 2000 + RESULT))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[int, ...]:
        """Return the prompt."""
        return self.prompt

    def encode_turn(self, messages: Sequence[Mapping[str, Any]], **_: Any) -> tuple[int, ...]:
        """Return the tokens of a result."""
        return self.result

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return a text."""
        return "a call"


@attrs.define(eq=False)
class Server:
    """Answers a request at once, after a wait, or when it is allowed to."""

    seconds: Callable[[], float] | None = None
    last: int | None = None  #: length of the prompt of the last turn, whose answers are held
    held: int = 0
    all_held: asyncio.Event = attrs.field(factory=asyncio.Event)
    allowed: asyncio.Event = attrs.field(factory=asyncio.Event)
    rollouts: int = 0

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Return new tokens, with numbers that are objects of their own."""
        if self.seconds is not None:
            _SLEPT.get().append(seconds := self.seconds())
            await asyncio.sleep(seconds)
        elif self.last == len(request.prompt_ids):
            self.held += 1
            if self.held == self.rollouts:
                self.all_held.set()
            await self.allowed.wait()
        else:
            await asyncio.sleep(0)
        at = 10_000 + len(request.prompt_ids)
        return GenerateResult(
            request_id=request.request_id,
            token_ids=(*range(at, at + ANSWER - 1), 0),
            log_probs=tuple([-1.0 / each for each in range(1, ANSWER + 1)]),
            weight_versions=(3,) * ANSWER,
            finish_reason="stop",
        )

    async def health(self) -> HealthReport:
        """Report a healthy server."""
        return HealthReport(healthy=True)


class Agent(AgentLoopBase):
    """Calls a tool in each turn but the last."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        """Work on one task."""
        settings, slept = self.config, list[float]()
        _SLEPT.set(slept)
        builder = SequenceBuilder(
            self.context, sampling_params, fields["messages"], tools=self.context.tools.schemas, task=fields["task_id"]
        )
        for turn in range(settings.turns):
            began = now()
            await builder.generate()
            if turn == settings.turns - 1:
                break
            result = await self.context.tools.call(ToolCall(name="add", arguments={"a": turn, "b": 1}))
            builder.append_turn([{"role": "tool", "content": result.text}])
            settings.note(began, slept)
        return AgentLoopOutput(sequences=sequences_of([builder]), num_turns=settings.turns, end_reason="answered")


@attrs.frozen
class Settings:
    """What the agent of one measurement does."""

    turns: int
    ends: list[float] = attrs.field(factory=list)  #: when turns have ended
    delays: list[float] = attrs.field(factory=list)  #: what turns took beyond the server's time, if that is known

    def note(self, began: float, slept: Sequence[float]) -> None:
        """Note the end of a turn."""
        self.ends.append(ended := now())
        if slept:
            self.delays.append(ended - began - slept[-1])


async def worker_of(settings: Settings, server: Server, folder: Path, stack: AsyncExitStack) -> AgentWorker:
    """Make an agent worker as a run does."""
    from jackfield_tools import Toolbox

    clock = Clock()
    tokenizer: Any = Tokenizer()
    backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
    await backend.start()
    stack.push_async_callback(backend.close)
    router, replica = Router(clock), Replica(server, number=0, clock=clock)  # type: ignore[arg-type]
    await router.route({0: replica}, 0.0)
    (folder / "tool.py").write_text(_TOOL)
    shared: Any = {"tokenizer": tokenizer, "clock": clock}
    worker = AgentWorkerContext(folder=folder / "scratch", **shared)
    host = AgentHost(
        make=partial(Agent, settings),
        generator=router.of_one_rollout,
        context=AgentContext(generate=server.generate, request_prefix="run", max_model_len=32_768, **shared),
        life=(Agent, settings),
        worker=worker,
        toolbox=Toolbox({"add": {"function": f"{folder / 'tool.py'}:add", "concurrency": 4096}}, worker),
    )
    stack.push_async_callback(host.close)
    await host.start()
    return AgentWorker(Values(backend), tokenizer, clock, host, vocabulary=100_000, versions=True)


def jobs_of(rollouts: int, turns: int) -> list[RolloutJob]:
    """Return jobs of whole groups."""
    sampling = {"temperature": 1.0, "max_new_tokens": turns * ANSWER}
    found = []
    for at in range(0, rollouts, GROUP):
        task = Task(id=f"task-{at}", messages=({"role": "user", "content": "What is 1 + 1?"},))
        numbers = dict(enumerate(range(at, min(at + GROUP, rollouts))))
        group = GroupKey("train", 0, at // GROUP)
        found.append(RolloutJob(group=group, task=task, rollouts=numbers, sampling=sampling, seconds=SECONDS))
    return found


async def hosted(rollouts: int, settings: Settings, server: Server, folder: Path) -> Callable[[], Awaitable[None]]:
    """Return what runs all rollouts in an agent worker, and closes it."""
    stack = AsyncExitStack()
    worker, jobs = await worker_of(settings, server, folder, stack), jobs_of(rollouts, settings.turns)

    async def work() -> None:
        done = 0
        async with stack:
            async for reports in worker.run(jobs):
                assert all(each.error is None for each in reports), [each.error for each in reports]
                done += len(reports)
        assert done == rollouts

    return work


async def bare(rollouts: int, settings: Settings, server: Server, folder: Path) -> Callable[[], Awaitable[None]]:
    """Return what does the same with nothing around it."""
    prompt, result = Tokenizer.prompt, Tokenizer.result

    async def add(a: int, b: int) -> int:
        return a + b

    async def rollout(number: int) -> int:
        ids, mask, log_probs, versions = list(prompt), list[int](), list[float](), list[int]()
        slept = list[float]()
        _SLEPT.set(slept)
        for turn in range(settings.turns):
            began = now()
            answer = await server.generate(GenerateRequest(request_id=f"{number}/{turn}", prompt_ids=tuple(ids)))
            ids += answer.token_ids
            mask += [1] * ANSWER
            log_probs += answer.log_probs
            versions += answer.weight_versions
            if turn == settings.turns - 1:
                break
            await add(turn, 1)
            ids += result
            mask += [0] * RESULT
            log_probs += [0.0] * RESULT
            versions += [-1] * RESULT
            settings.note(began, slept)
        return len(ids)

    async def work() -> None:
        await asyncio.gather(*map(rollout, range(rollouts)))

    return work


Kind = Callable[[int, Settings, Server, Path], Awaitable[Callable[[], Awaitable[None]]]]


def instant(kind: Kind, rollouts: int, turns: int, folder: Path) -> tuple[float, list[float]]:
    """Return the processor time of all rollouts, and the times from the end of a turn to that of the next, ascending.

    Both are in seconds; the server answers at once.
    """
    settings = Settings(turns)

    async def main() -> float:
        work = await kind(rollouts, settings, Server(), folder)
        gc.collect()
        began = time.process_time()
        await work()
        return time.process_time() - began

    return run(main()), sorted(end - before for before, end in itertools.pairwise(settings.ends))


def delays_of(kind: Kind, rollouts: int, turns: int, scale: float, folder: Path) -> list[float]:
    """Return what each turn takes beyond the server's time, in seconds and in ascending order."""
    drawn, settings = random.Random(rollouts), Settings(turns)

    async def main() -> None:
        server = Server(seconds=lambda: drawn.uniform(0.5, 1.5) / scale)
        await (await kind(rollouts, settings, server, folder))()

    run(main())
    return sorted(settings.delays)


def bytes_of(kind: Kind, rollouts: int, turns: int, folder: Path) -> float:
    """Return the bytes of a rollout that waits for its last answer."""

    async def main() -> float:
        last = PROMPT + (turns - 1) * (ANSWER + RESULT)
        server = Server(last=last, rollouts=rollouts)
        work = await kind(rollouts, Settings(turns), server, folder)
        gc.collect()
        tracemalloc.start()
        running = asyncio.ensure_future(work())
        await server.all_held.wait()
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        server.allowed.set()
        await running
        return used / rollouts

    return run(main())


@attrs.frozen(kw_only=True)
class Side:
    """What was measured of the host of agent loops, or of bare coroutines."""

    microseconds: float  #: of processor time per turn
    instant: Mapping[str, float]  #: ms of a turn by percentile, with servers that answer at once
    delays: Mapping[str, float]  #: ms by percentile that a turn takes beyond a server that takes a second
    kib: float | None  #: per rollout


@attrs.frozen(kw_only=True)
class Measured:
    """The result for one number of rollouts."""

    rollouts: int
    hosted: Side
    bare: Side


def measure(rollouts: int, turns: int, repeat: int, scale: float, folder: Path) -> Measured:
    """Measure both kinds in turn."""
    sides, runs = dict[str, Side](), max(repeat, FEWEST // rollouts)
    for kind in (bare, hosted):
        seconds, between = zip(*(instant(kind, rollouts, turns, folder) for _ in range(runs)), strict=True)
        sides[kind.__name__] = Side(
            microseconds=statistics.median(seconds) / rollouts / turns * 1e6,
            instant=percentiles(sorted(each for run in between for each in run)),
            delays=percentiles(delays_of(kind, rollouts, turns, scale, folder)),
            kib=bytes_of(kind, rollouts, turns, folder) / 1024 if rollouts <= MOST_TRACED else None,
        )
    return Measured(rollouts=rollouts, **sides)


def percentiles(ordered: Sequence[float]) -> dict[str, float]:
    """Return the median and the 99th percentile of seconds, in milliseconds."""
    return {f"p{part}": ordered[len(ordered) * part // 100] * 1e3 for part in (50, 99)}


def show(each: Measured) -> None:
    """Print a line for each side."""
    for name, side in (("hosted", each.hosted), ("bare", each.bare)):
        kib = "" if side.kib is None else f"  {side.kib:6.1f} KiB per rollout"
        texts = [" ".join(f"{key} {value:.3f}" for key, value in part.items()) for part in (side.instant, side.delays)]
        print(
            f"{each.rollouts:6} rollouts {name:6} {side.microseconds:6.1f} µs per turn"
            f"  ms, instant servers: {texts[0]}  ms, servers that take a second: {texts[1]}{kib}"
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=None)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--curve", type=Path, default=None, help="draw the results into this file")
    asked = parser.parse_args()
    own_process()
    with collection_paused():
        import torch  # noqa: F401
    sizes = asked.rollouts or ([8, 32] if asked.quick else [10, 30, 100, 300, 1000, 3000, 10_000])
    repeat, scale = asked.repeat or (1 if asked.quick else 3), 50.0 if asked.quick else 1.0
    found = list[Measured]()
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            found.append(measure(size, asked.turns, repeat, scale, Path(folder)))
            if not asked.json:
                show(found[-1])
    if asked.curve is not None:
        draw(found, asked.curve)
    if asked.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        print(json.dumps({**about, "turns": asked.turns, "results": [attrs.asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
