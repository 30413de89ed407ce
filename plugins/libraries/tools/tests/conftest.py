"""What the tests of tools share: a worker's tools, a rollout's calls, and what a context is told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolCall, ToolResult
from jackfield.clock import Clock
from jackfield_tools import Toolbox
from jackfield_tools.toolbox import RolloutTools


@attrs.define(eq=False)
class Told:
    """What a context was told."""

    metrics: dict[str, float] = attrs.field(factory=dict)
    events: list[dict[str, Any]] = attrs.field(factory=list)

    def metric(self, name: str, number: float) -> None:
        self.metrics[name] = self.metrics.get(name, 0.0) + number

    def event(self, name: str, **fields: Any) -> None:
        self.events.append({"event": name, **fields})


@attrs.define(eq=False)
class Worker:
    """The tools of a worker, and rollouts in it."""

    toolbox: Toolbox
    told: Told = attrs.field(factory=Told)
    clock: Clock = attrs.field(factory=Clock)

    def rollout(self, **fields: Any) -> RolloutTools:
        async def generate(request: Any) -> Any:
            raise NotImplementedError

        tokenizer: Any = None
        context = AgentContext(
            generate=generate, tokenizer=tokenizer, clock=self.clock, metric=self.told.metric, event=self.told.event
        )
        return self.toolbox.session(context, fields)


def worker_context(folder: Path, clock: Clock | None = None, **options: Any) -> AgentWorkerContext:
    tokenizer: Any = None
    return AgentWorkerContext(tokenizer=tokenizer, folder=folder, clock=clock or Clock(), **options)


@contextlib.asynccontextmanager
async def opened(folder: Path, settings: Mapping[str, Any], **options: Any) -> AsyncIterator[Worker]:
    """Open the tools of a worker; afterwards no task may be left."""
    before = asyncio.all_tasks()
    context = worker_context(folder, **options)
    toolbox = Toolbox(settings, context)
    await toolbox.start()
    try:
        yield Worker(toolbox, clock=context.clock)
    finally:
        await toolbox.close()
    assert set() == asyncio.all_tasks() - before


async def call(tools: RolloutTools, name: str, **arguments: Any) -> ToolResult:
    return await tools.call(ToolCall(name=name, arguments=arguments))


def with_tools(
    folder: Path, settings: Mapping[str, Any], work: Callable[[Worker], Awaitable[Any]], **options: Any
) -> Any:
    """Return what ``work`` returns with the tools of a worker."""

    async def main() -> Any:
        async with opened(folder, settings, **options) as worker:
            return await work(worker)

    return asyncio.run(main())


@pytest.fixture
def code(tmp_path: Path) -> Callable[[str], str]:
    """Write a file of tools and return its path."""

    def write(text: str, name: str = "tools.py") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write
