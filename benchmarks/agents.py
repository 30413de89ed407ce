"""Agents: what the host of agent loops adds to a turn, and to the memory of a rollout, against bare coroutines.

    python benchmarks/agents.py [--rollouts 10 100 1000 3000 10000] [--turns 8] [--repeat 3] [--quick] [--json]

An agent with the sequence builder asks the model, calls a tool, appends its result, and so on: a prompt of 200 tokens,
and per turn 50 tokens of the model and 20 of the tool's result. One agent worker runs all rollouts at once, as in a
run: with the router, a replica, the run's tools (a coroutine function), the checks of what the agent returns, and the
writing of all samples to a queue's backend in memory. Server and tool answer at once; the tokenizer is a table, as its
cost is its own.

The bare equivalent is a coroutine per rollout with the same server and the same tool, which appends the tokens to four
lists and ends.

``µs per turn``: processor time of this process, less that of the bare equivalent, divided by all turns; the median of
the repetitions. ``delay``: with a server that takes 0.5 to 1.5 s, what a turn takes longer than server and tool, as
seen by the agent: from the answer of the server to its next request. ``KiB per rollout``: what Python has allocated
while each rollout waits for its last answer. ``--quick`` shows that the benchmark works, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
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
            began = time.perf_counter()
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
    delays: list[float] = attrs.field(factory=list)  #: what turns took beyond the server's time, if that is known

    def note(self, began: float, slept: Sequence[float]) -> None:
        """Note the end of a turn."""
        if slept:
            self.delays.append(time.perf_counter() - began - slept[-1])


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

    async def run() -> None:
        done = 0
        async with stack:
            async for reports in worker.run(jobs):
                assert all(each.error is None for each in reports), [each.error for each in reports]
                done += len(reports)
        assert done == rollouts

    return run


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
            began = time.perf_counter()
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

    async def run() -> None:
        await asyncio.gather(*map(rollout, range(rollouts)))

    return run


Kind = Callable[[int, Settings, Server, Path], Awaitable[Callable[[], Awaitable[None]]]]


def processor_seconds(kind: Kind, rollouts: int, turns: int, folder: Path) -> float:
    """Return the processor time of all rollouts."""

    async def main() -> float:
        run = await kind(rollouts, Settings(turns), Server(), folder)
        gc.collect()
        began = time.process_time()
        await run()
        return time.process_time() - began

    return asyncio.run(main())


def delays_of(kind: Kind, rollouts: int, turns: int, scale: float, folder: Path) -> list[float]:
    """Return what each turn takes beyond the server's time, in seconds and in ascending order."""
    drawn, settings = random.Random(rollouts), Settings(turns)

    async def main() -> None:
        server = Server(seconds=lambda: drawn.uniform(0.5, 1.5) / scale)
        await (await kind(rollouts, settings, server, folder))()

    asyncio.run(main())
    return sorted(settings.delays)


def bytes_of(kind: Kind, rollouts: int, turns: int, folder: Path) -> float:
    """Return the bytes of a rollout that waits for its last answer."""

    async def main() -> float:
        last = PROMPT + (turns - 1) * (ANSWER + RESULT)
        server = Server(last=last, rollouts=rollouts)
        run = await kind(rollouts, Settings(turns), server, folder)
        gc.collect()
        tracemalloc.start()
        running = asyncio.ensure_future(run())
        await server.all_held.wait()
        gc.collect()
        used, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        server.allowed.set()
        await running
        return used / rollouts

    return asyncio.run(main())


@attrs.frozen(kw_only=True)
class Measured:
    """The result for one number of rollouts."""

    rollouts: int
    microseconds: float  #: of processor time per turn, beyond the bare equivalent
    bare: float  #: µs of processor time per turn of the bare equivalent
    kib: float  #: per rollout
    bare_kib: float
    delays: Mapping[str, float]  #: ms by percentile, with a server that takes a second; and those of the bare one


def measure(rollouts: int, turns: int, repeat: int, scale: float, folder: Path) -> Measured:
    """Measure both kinds in turn."""
    count = rollouts * turns
    least = statistics.median(processor_seconds(bare, rollouts, turns, folder) for _ in range(repeat))
    whole = statistics.median(processor_seconds(hosted, rollouts, turns, folder) for _ in range(repeat))
    delays = dict[str, float]()
    for name, kind in (("bare ", bare), ("", hosted)):
        found = delays_of(kind, rollouts, turns, scale, folder)
        delays |= {f"{name}p{part}": found[len(found) * part // 100] * 1e3 for part in (50, 99)}
    sizes = [bytes_of(kind, rollouts, turns, folder) / 1024 for kind in (hosted, bare)]
    return Measured(
        rollouts=rollouts,
        microseconds=(whole - least) / count * 1e6,
        bare=least / count * 1e6,
        kib=sizes[0],
        bare_kib=sizes[1],
        delays=delays,
    )


def show(each: Measured) -> None:
    """Print a line."""
    delays = ", ".join(f"{name} {value:.2f}" for name, value in each.delays.items())
    cost = f"{each.microseconds:6.1f} µs per turn (bare {each.bare:5.1f})"
    print(
        f"{each.rollouts:6} rollouts  {cost}  {each.kib:6.1f} KiB per rollout (bare {each.bare_kib:.1f})  ms: {delays}"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, nargs="+", default=None)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=None)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    own_process()
    with collection_paused():
        import torch  # noqa: F401
    sizes = asked.rollouts or ([8, 32] if asked.quick else [10, 100, 1000, 3000, 10_000])
    repeat, scale = asked.repeat or (1 if asked.quick else 3), 50.0 if asked.quick else 1.0
    found = list[Measured]()
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            found.append(measure(size, asked.turns, repeat, scale, Path(folder)))
            if not asked.json:
                show(found[-1])
    if asked.json:
        about = {"machine": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        print(json.dumps({**about, "turns": asked.turns, "results": [attrs.asdict(each) for each in found]}))


if __name__ == "__main__":
    main()
