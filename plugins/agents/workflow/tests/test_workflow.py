"""The life of workflows: objects that are used again, threads, tools, environments, failures and cancellations."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.agent import AgentContext, ToolCall, ToolResult
from jackfield.abc.reward import GeneratedText
from jackfield.errors import AgentError, ConfigError
from jackfield_agent_workflow import Task, Workflow
from jackfield_agent_workflow.agent import WorkflowAgent
from jackfield_agent_workflow.settings import Config
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_testing import in_loop

from .flows import MESSAGES, Ask, hosting, said


class Counts(Workflow):
    """Counts its objects, and what is done to them."""

    made = resets = closed = 0

    def __init__(self, *, base: float = 0.0) -> None:
        type(self).made += 1
        self.base = base

    async def reset(self, task: Task) -> None:
        type(self).resets += 1

    async def close(self) -> None:
        type(self).closed += 1

    async def run(self, task: Task) -> float:
        reply = await self.model.chat(task.messages)
        if task.get("fails"):
            raise ValueError("on purpose")
        return self.base + len(reply.text)


@pytest.fixture
def counts() -> type[Counts]:
    Counts.made = Counts.resets = Counts.closed = 0
    return Counts


@in_loop
async def test_a_number_that_run_returns_is_the_reward(tmp_path: Path) -> None:
    async with hosting(Ask, tmp_path) as host:
        output = await host.run(Model(["is it 7"], Letters()))
    assert [7.0] == [sequence.reward for sequence in output.sequences]


def test_objects_are_used_again(tmp_path: Path, counts: type[Counts]) -> None:
    """As many are made as run at the same time; settings are keyword arguments; all are closed at the end."""

    async def main() -> None:
        async with hosting(Counts, tmp_path, settings={"base": 0.5}) as host:
            for _ in range(3):
                [sequence] = (await host.run(Model(["one"], Letters()))).sequences
                assert 3.5 == sequence.reward
            assert (1, 3, 0) == (counts.made, counts.resets, counts.closed)
            await asyncio.gather(*[host.run(Model(["one"], Letters())) for _ in range(4)])
            assert (4, 7, 0) == (counts.made, counts.resets, counts.closed)
        assert 4 == counts.closed

    asyncio.run(main())


@pytest.mark.parametrize("how", ["fails", "cancelled"])
def test_an_object_whose_rollout_failed_is_closed_and_not_used_again(
    tmp_path: Path, counts: type[Counts], how: str
) -> None:
    async def main() -> None:
        async with hosting(Counts, tmp_path) as host:
            model = Model(["one"], Letters(), hang_at=0 if how == "cancelled" else None)
            running = asyncio.create_task(host.run(model, fails=how == "fails"))
            if how == "cancelled":
                await model.hangs.wait()
                running.cancel()
            with pytest.raises((ValueError, asyncio.CancelledError)):
                await running
            assert (1, 1) == (counts.made, counts.closed)
            await host.run(Model(["one"], Letters()))
            assert 2 == counts.made

    asyncio.run(main())


class Plain:
    """No workflow."""


class Picky(Workflow):
    def __init__(self, *, level: int) -> None:
        self.level = level


@pytest.mark.parametrize(
    ("name", "settings", "where"),
    [
        ("Plain", {}, "agent.workflow"),
        ("Nowhere", {}, "agent.workflow"),
        ("Picky", {}, "agent.settings"),
        ("Picky", {"level": 1, "color": "red"}, "agent.settings"),
    ],
)
@in_loop
async def test_a_class_that_cannot_be_used_is_refused_at_the_start(
    tmp_path: Path, name: str, settings: dict[str, Any], where: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        async with hosting(f"{__name__}:{name}", tmp_path, settings=settings):
            raise AssertionError
    assert where == caught.value.where


@in_loop
async def test_a_class_in_a_file_imports_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_flow.py").write_text("REWARD = 0.75\n")
    (tmp_path / "flow.py").write_text(
        "from neighbour_of_flow import REWARD\nfrom jackfield_agent_workflow import Workflow\n\n\n"
        "class Own(Workflow):\n    async def run(self, task):\n        await self.model.chat(task.question)\n"
        "        return REWARD\n"
    )
    model = Model(["one"], Letters())
    async with hosting(f"{tmp_path / 'flow.py'}:Own", tmp_path / "scratch") as host:
        [sequence] = (await host.run(model)).sequences
    assert 0.75 == sequence.reward
    assert "ask" == said(model, 0)


@in_loop
async def test_a_task_without_messages_is_refused(tmp_path: Path) -> None:
    async with hosting(Ask, tmp_path) as host:
        with pytest.raises(AgentError) as caught:
            await host.run(Model(["1"], Letters()), messages=[])
    assert "task t:1" == caught.value.where


@in_loop
async def test_a_host_without_a_life_of_workers_is_enough() -> None:
    """Class and environment are then opened for the one rollout."""
    config = Config(workflow=f"{Ask.__module__}:Ask")
    model = Model(["1"], Letters())
    agent = WorkflowAgent(config, AgentContext(generate=model, tokenizer=model.tokenizer))
    output = await agent.run({}, messages=MESSAGES)
    assert 1 == len(output.sequences)
    assert {asyncio.current_task()} == asyncio.all_tasks()


class Waits(Workflow):
    """A plain function: its calls block."""

    def run(self, task: Task) -> float:  # type: ignore[override]
        assert threading.current_thread() is not threading.main_thread()
        first = self.model.chat(task.messages)
        heard = self.agent("second").chat(f"heard {first}")  # type: ignore[attr-defined]
        judged = self.models["judge"].chat(heard.text)
        seen = self.environment.reset(seed=1)
        step = self.environment.step("go to kitchen")
        self.metric("texts", len(judged.text) + bool(seen.text) + bool(step.text))  # type: ignore[attr-defined]
        self.reward(0.5, heard)
        return 1.0


async def judge(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
    return GeneratedText(text=f"{model}: {messages[-1]['content']}", tokens=3)


@in_loop
async def test_a_run_that_is_a_plain_function_runs_in_a_thread(tmp_path: Path) -> None:
    environment = {"name": "household", "run": "inline"}
    model = Model(["one", "two"], Letters())
    async with hosting(Waits, tmp_path, environment=environment) as host:
        output = await host.run(model, context={"chat": judge})
    assert "heard one" == said(model, 1)
    assert {"texts": float(len("judge: two") + 2)} == output.metrics
    assert [None, 1.5] == [sequence.reward for sequence in output.sequences]
    assert not [each for each in threading.enumerate() if each.name.startswith("workflow")]


class Fails(Workflow):
    def run(self, task: Task) -> None:  # type: ignore[override]
        self.model.chat(task.messages)
        raise SystemExit(3)


@in_loop
async def test_what_a_thread_raises_fails_the_rollout(tmp_path: Path) -> None:
    async with hosting(Fails, tmp_path) as host:
        with pytest.raises(RuntimeError, match="SystemExit"):
            await host.run(Model(["one"], Letters()))


@in_loop
async def test_cancelling_ends_the_call_that_a_thread_waits_for(tmp_path: Path) -> None:
    """The thread is gone, too: its next call raises."""
    async with hosting(Fails, tmp_path) as host:
        model = Model(["one"], Letters(), hang_at=0)
        running = asyncio.create_task(host.run(model))
        await model.hangs.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert 0 == model.running
        assert not [each for each in threading.enumerate() if each.name.startswith("workflow")]


STUCK, STARTED = threading.Event(), threading.Event()


class Stuck(Workflow):
    def run(self, task: Task) -> None:  # type: ignore[override]
        STARTED.set()
        STUCK.wait()


@in_loop
async def test_a_thread_that_does_not_end_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jackfield_agent_workflow.blocking._LEAVE_SECONDS", 0.05)
    async with hosting(Stuck, tmp_path) as host:
        running = asyncio.create_task(host.run(Model(["one"], Letters())))
        await asyncio.to_thread(STARTED.wait)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    STUCK.set()
    [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "Stuck, t:1" in warning.getMessage()
    for thread in threading.enumerate():
        if thread.name.startswith("workflow"):
            await asyncio.to_thread(thread.join, 10.0)


class Looks(Workflow):
    async def run(self, task: Task) -> None:
        reply = await self.model.chat(task.messages, tools=self.tools.schemas)
        result = await self.tools.call("look", {"at": reply.text}, reply)
        said = {"role": "tool", "content": result.text}
        await self.model.chat([*task.messages, reply.message, said], tools=self.tools.schemas)


class Session:
    """Tools that say what they were asked."""

    schemas = ({"type": "function", "function": {"name": "look", "parameters": {}}},)

    async def call(self, call: ToolCall) -> ToolResult:
        return ToolResult(text=f"saw {call.arguments['at']}", reward=0.25)


@in_loop
async def test_tools_are_called_noted_and_rewarded(tmp_path: Path) -> None:
    model = Model(["one", "two"], Letters())
    async with hosting(Looks, tmp_path) as host:
        output = await host.run(model, context={"tools": Session()})
    assert ({"name": "look", "arguments": {"at": "one"}},) == output.tool_calls
    assert "saw one" in said(model, 1)
    [sequence] = output.sequences
    assert sequence.token_rewards is not None
    assert (0.0, 0.25) == (sequence.reward, sum(sequence.token_rewards))


class Wild(Workflow):
    """Calls tools with everything that an answer may have in place of arguments."""

    given: tuple[tuple[Any, Any], ...] = (
        ("look", '{"at": "text"}'), ("look", {"at": "mapping"}),
        ("look", "{"), ("look", "[1]"), ("look", [("at", 1), 2]), ("look", None), ("look", 3), (["look"], {}),
        ("look", {}), ("look", ""),
    )  # fmt: skip
    results: Sequence[ToolResult] = ()

    async def run(self, task: Task) -> None:
        early = await self.tools.call("look", {"at": "early"})  # its reward is for no answer
        await self.model.chat(task.messages)
        type(self).results = [early, *[await self.tools.call(name, arguments) for name, arguments in self.given]]


@in_loop
async def test_a_call_takes_json_as_text_and_never_raises(tmp_path: Path) -> None:
    async with hosting(Wild, tmp_path) as host:
        output = await host.run(Model(["one"], Letters()), context={"tools": Session()})
    early, *results = Wild.results
    assert early.is_error
    assert ["saw text", "saw mapping"] == [result.text for result in results[:2]]
    assert [False] * 2 + [True] * 8 == [result.is_error for result in results]
    assert {"name": "look", "arguments": {"at": "text"}} in output.tool_calls
    assert "JSON" in results[2].text


class Enters(Workflow):
    async def run(self, task: Task) -> None:
        await self.environment.reset(seed=1)
        await self.model.chat(task.messages)


@pytest.mark.parametrize("how", ["ends", "fails", "is cancelled"])
@in_loop
async def test_the_environment_is_given_back(tmp_path: Path, how: str) -> None:
    """Also by a rollout that failed or was cancelled, so one object is enough."""
    environment = {"name": "household", "run": "inline", "size": 1, "wait_seconds": 5.0}
    async with hosting(Enters, tmp_path, environment=environment) as host:
        for _ in range(3):
            model = Model(["one"], Letters(), fails=how == "fails", hang_at=0 if how == "is cancelled" else None)
            running = asyncio.create_task(host.run(model))
            if how == "is cancelled":
                await model.hangs.wait()
                running.cancel()
            ended: Any = (await asyncio.gather(running, return_exceptions=True))[0]
            assert (how == "ends") == (not isinstance(ended, BaseException))
        pool = host.shared.environments
        assert (1, 3, 0) == (pool.counts.opened, pool.counts.episodes, pool.counts.replaced)


@in_loop
async def test_without_an_environment_its_use_is_refused(tmp_path: Path) -> None:
    async with hosting(Enters, tmp_path) as host:
        with pytest.raises(AgentError) as caught:
            await host.run(Model(["one"], Letters()))
    assert "agent.environment" == caught.value.code


@in_loop
async def test_thousands_of_rollouts_at_a_time(tmp_path: Path) -> None:
    async with hosting(Ask, tmp_path) as host:
        models = [Model(["1"], Letters()) for _ in range(2000)]
        outputs = await asyncio.gather(*map(host.run, models))
    assert 2000 == sum(len(output.sequences) for output in outputs)


def test_everything_public_is_listed_in_order() -> None:
    import jackfield_agent_workflow as package

    assert sorted(package.__all__) == package.__all__
    assert all(isinstance(getattr(package, name), type | Callable) for name in package.__all__)  # type: ignore[arg-type]
