"""Tests of what an agent worker gives to agent loops since ABI 1.1, and of how it ends, repeats and drops rollouts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs
import pytest

from jackfield.abc.agent import (
    AgentContext,
    AgentLoopBase,
    AgentLoopOutput,
    AgentSequence,
    AgentWorkerContext,
    ChatTokenizer,
    ToolCall,
    ToolResult,
)
from jackfield.abc.rollout import GenerateRequest, GenerateResult, SamplingParams
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.config.agent_service import AgentServiceConfig
from jackfield.data.formats import Task
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob
from jackfield.runtime.agents import AgentHost
from jackfield.runtime.tags import said_metrics
from jackfield.sdk.cells import rows_of

GOOD = AgentSequence(
    prompt_ids=(1, 2),
    response_ids=(3, 4, 5, 6),
    response_mask=(1, 1, 0, 1),
    response_log_probs=(-1.0, -1.0, 0.0, -1.0),
    weight_versions=(0, 0, -1, 0),
)
DONE = AgentLoopOutput(sequences=(GOOD,))
TASK = Task(id="one", messages=({"role": "user", "content": "abcd"},), fields={"level": 3})

Run = Callable[["Loop", Mapping[str, Any]], Any]


class Loop(AgentLoopBase):
    """An agent whose settings are a function that does the work."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        return cast(AgentLoopOutput, await self.config(self, sampling_params))


def generator(asks: Callable[[SamplingParams], None]) -> Any:
    async def generate(request: GenerateRequest) -> GenerateResult:
        asks(request.sampling)
        values: Any = {"token_ids": (3, 4), "log_probs": (-1.0, -1.0), "weight_versions": (7, 7)}
        return GenerateResult(request_id=request.request_id, finish_reason="stop", **values)

    return generate


def host(run: Run, folder: Path | None = None, cls: type[AgentLoopBase] = Loop, **options: Any) -> AgentHost:
    tokenizer = cast(ChatTokenizer, None)
    made: dict[str, Any] = {"make": lambda context: cls(run, context), "generator": generator}
    if folder is not None:
        made["life"] = cls, run
        made["worker"] = AgentWorkerContext(tokenizer=tokenizer, folder=folder)
    toolbox, settings = options.pop("toolbox", None), AgentServiceConfig(**options)
    return AgentHost(**made, settings=settings, toolbox=toolbox)


async def reports_of(
    agents: AgentHost, rollouts: int = 1, extra: int = 0, seconds: float = 30.0
) -> tuple[list[RolloutReport], Values]:
    """Run one group, whose seeds count from 0; return the reports in the order of their numbers."""
    values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
    worker = AgentWorker(values, cast(ChatTokenizer, None), Clock(), agents, vocabulary=100)
    seeds = list(range(rollouts + extra))
    shared: Any = {"group": GroupKey("train", 0, 0), "task": TASK, "sampling": {}, "seconds": seconds}
    job = RolloutJob(rollouts=dict(enumerate(seeds[:rollouts])), extra=tuple(seeds[rollouts:]), **shared)
    found = [report async for reports in worker.run([job]) for report in reports]
    return sorted(found, key=lambda report: report.rollout), values


def run_group(agents: AgentHost, *arguments: Any, **named: Any) -> list[RolloutReport]:
    return asyncio.run(reports_of(agents, *arguments, **named))[0]


async def forever() -> None:
    await asyncio.Event().wait()


# -- the life in the worker


def test_what_a_worker_shares_lives_from_before_its_first_rollout_until_after_its_last(tmp_path: Path) -> None:
    steps: list[str] = []

    class Sharing(Loop):
        @classmethod
        async def start(cls, config: Any, context: AgentWorkerContext) -> Any:
            assert context.folder.is_dir()
            steps.append("start")
            return "a pool"

        @classmethod
        async def close(cls, shared: Any) -> None:
            steps.append(f"close {shared}")

        async def finish(self) -> None:
            steps.append("finish")

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        steps.append(f"run with {loop.context.shared}")
        return DONE

    async def main() -> None:
        agents = host(run, tmp_path / "worker", Sharing)
        (tmp_path / "worker").mkdir()
        await agents.start()
        await reports_of(agents)
        await agents.close()

    asyncio.run(main())
    assert ["start", "run with a pool", "finish", "close a pool"] == steps
    assert not (tmp_path / "worker").exists()


@pytest.mark.parametrize("how", ["returns", "raises", "hangs"])
def test_a_loop_is_cleaned_up_after_however_it_ends(how: str, tmp_path: Path) -> None:
    """Its finish is called, its tools are closed, its scratch folder is removed, before the report."""
    done: list[str] = []

    class Session:
        schemas = ()

        async def call(self, call: ToolCall) -> ToolResult:
            return ToolResult(text=call.name)

        async def close(self) -> None:
            done.append("session")

    class Toolbox:
        async def start(self) -> None:
            done.append("start")

        def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
            assert fields["level"] == 3
            return Session()

        async def close(self) -> None:
            done.append("close")

    class Careful(Loop):
        async def finish(self) -> None:
            done.append("finish")
            raise OSError("logged, and not raised")

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        folders.append(loop.context.folder())
        assert loop.context.folder() == folders[0]
        assert (await loop.context.tools.call(ToolCall(name="echo"))).text == "echo"
        if how == "raises":
            raise ValueError("no")
        if how == "hangs":
            await forever()
        return DONE

    async def main() -> list[RolloutReport]:
        agents = host(run, tmp_path, Careful, toolbox=Toolbox())
        await agents.start()
        reports, _ = await reports_of(agents, seconds=0.2 if how == "hangs" else 30.0)
        folder_exists.append(folders[0].exists())
        await agents.close()
        return reports

    folders, folder_exists = list[Path](), list[bool]()
    (report,) = asyncio.run(main())
    codes = {"returns": None, "raises": "agent.failed", "hangs": "deadline"}
    assert codes[how] == (report.error and report.error[report.error.rindex("[") + 1 : -1])
    assert ["start", "finish", "session", "close"] == done
    assert [False] == folder_exists


def test_what_a_loop_says_beside_tokens_becomes_tags_and_the_column_task() -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        context = loop.context
        assert 0 < context.seconds_left <= 30.0
        assert sampling["seed"] == context.seed
        request = GenerateRequest(request_id="r", prompt_ids=(1,), sampling=SamplingParams(seed=context.seed))
        await context.generate(request)
        context.metric("tools/calls", 1.0)
        context.metric("tools/calls", 2.0)
        context.event("tool", name_of_tool="calculator")
        branch = attrs.evolve(GOOD, parent=0, relation="branch", name="planner", step_id=1)
        shared: Any = {"metrics": {"depth": 2.0}, "num_turns": 2, "end_reason": "answered"}
        return AgentLoopOutput(sequences=(GOOD, branch), **shared)

    async def main() -> tuple[RolloutReport, list[Any]]:
        (report,), values = await reports_of(host(run))
        tasks = await values.get("train", report.keys, ("task",))
        return report, rows_of(tasks["task"])

    report, (first, second) = asyncio.run(main())
    tags, more = report.written.tags
    assert (3.0, 2.0, 2, "answered") == (
        tags["agent/tools/calls"],
        tags["agent/depth"],
        tags["turns"],
        tags["end_reason"],
    )
    assert (0, "branch", "planner", 1) == (more["parent"], more["relation"], more["agent_name"], more["step_id"])
    assert "parent" not in tags
    told = first["rollout"]
    assert ({"tools/calls": 3.0, "depth": 2.0}, "answered", 2) == (told["metrics"], told["end_reason"], told["turns"])
    assert [("generate", 2, 7), ("tool", None, None)] == [
        (each["name"], each.get("tokens"), each.get("weight_version")) for each in told["events"]
    ]
    assert all(each["at"] >= 0 for each in told["events"])
    assert "events" not in second["rollout"]
    assert {"agent/turns": 2.0, "agent/ended/answered": 0.5} == {
        name: value
        for name, value in said_metrics([tags, {"turns": 2}]).items()
        if name in ("agent/turns", "agent/ended/answered")
    }


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"turn_rewards": (1.0, 2.0)}, [0.0, 1.0, 0.0, 2.0]),
        ({"turn_rewards": (1.0, 2.0), "reward": 4.0}, [0.0, 1.0, 0.0, 6.0]),
        ({"token_rewards": (0.5, 0.0, 0.25, 0.0), "turn_rewards": (1.0, 0.0)}, [0.5, 1.0, 0.25, 0.0]),
    ],
    ids=str,
)
def test_rewards_of_turns_and_tokens_are_added_up_by_token(fields: dict[str, Any], expected: list[float]) -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        return AgentLoopOutput(sequences=(attrs.evolve(GOOD, **fields),))

    async def main() -> Any:
        (report,), values = await reports_of(host(run))
        return rows_of((await values.get("train", report.keys, ("task",)))["task"])[0]

    task = asyncio.run(main())
    assert (expected, sum(expected)) == (task["token_rewards"], task["reward"])


@pytest.mark.parametrize(
    "output",
    [
        attrs.evolve(DONE, end_reason="No more budget!"),
        attrs.evolve(DONE, end_reason=None),
        AgentLoopOutput(sequences=(attrs.evolve(GOOD, turn_rewards=(1.0,)),)),
        AgentLoopOutput(sequences=(attrs.evolve(GOOD, token_rewards=(1.0,)),)),
        AgentLoopOutput(sequences=(attrs.evolve(GOOD, token_rewards=(float("nan"),) * 4),)),
        AgentLoopOutput(sequences=(attrs.evolve(GOOD, parent=0, relation="branch"),)),
        AgentLoopOutput(sequences=(GOOD, attrs.evolve(GOOD, parent=0))),
        AgentLoopOutput(sequences=(GOOD, attrs.evolve(GOOD, relation="branch"))),
        AgentLoopOutput(sequences=(GOOD, attrs.evolve(GOOD, parent=0, relation="cousin"))),
        AgentLoopOutput(sequences=(attrs.evolve(GOOD, name=7),)),
        AgentLoopOutput(sequences=(GOOD,), tool_calls=({"name": object()},)),
    ],
    ids=range(11),
)
def test_a_field_that_does_not_keep_the_contract_fails_the_rollout(output: AgentLoopOutput) -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        return output

    (report,) = run_group(host(run))
    assert "[agent.output]" in (report.error or "")


# -- limits, deadlines, retries


def test_no_more_rollouts_run_at_a_time_than_the_cap_and_none_waits_for_its_deadline() -> None:
    running, most = 0, 0

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        nonlocal running, most
        running += 1
        most = max(most, running)
        assert loop.context.seconds_left > 29.0
        for _ in range(3):
            await asyncio.sleep(0)
        running -= 1
        return DONE

    reports = run_group(host(run, concurrency=3), 10)
    assert (3, [None] * 10) == (most, [each.error for each in reports])


def test_under_a_cap_a_rollout_that_hangs_has_its_own_deadline_and_makes_room_for_the_next() -> None:
    """Its time counts from its turn: were it that of all eleven turns, the hanging one would have them all."""

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        if sampling["seed"] == 0:
            await forever()
        return DONE

    reports = run_group(host(run, concurrency=1), 11, seconds=1.0)
    assert ["deadline"] == [each.error[each.error.rindex("[") + 1 : -1] for each in reports if each.error]
    assert "waited 1 s" in str(reports[0].error)


def test_a_turn_that_the_model_does_not_answer_in_time_fails_its_rollout() -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        await loop.context.generate(GenerateRequest(request_id="r", prompt_ids=(1,)))
        return DONE

    def silent(asks: Any) -> Any:
        async def generate(request: GenerateRequest) -> GenerateResult:
            await forever()
            raise AssertionError

        return generate

    agents = host(run, turn_seconds=0.05)
    agents.generator = silent
    (report,) = run_group(agents)
    assert "[deadline]" in (report.error or "")


def test_a_rollout_that_takes_far_longer_than_usual_is_cancelled() -> None:
    """The 16 that ended lately took no time, so one that never ends is cancelled long before its deadline."""
    cancelled: list[int] = []

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        if sampling["seed"] == 16:
            try:
                await forever()
            except asyncio.CancelledError:
                cancelled.append(16)
                raise
        return DONE

    async def main() -> list[RolloutReport]:
        agents = host(run, times_usual=2.0, concurrency=1)
        return (await reports_of(agents, 17))[0]

    reports = asyncio.run(main())
    assert [16] == cancelled
    assert ["deadline"] == [each.error[each.error.rindex("[") + 1 : -1] for each in reports if each.error]


@pytest.mark.parametrize(("retries", "error"), [(1, "[agent.failed]"), (2, None)])
def test_a_rollout_that_fails_is_run_again_with_another_seed(retries: int, error: str | None) -> None:
    seeds: list[int] = []

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        seeds.append(sampling["seed"])
        if len(seeds) < 3:
            raise ConnectionError("the environment is away")
        return DONE

    (report,) = run_group(host(run, retries=retries))
    assert len(set(seeds)) == retries + 1
    assert (report.error is None) == (error is None)
    assert error is None or error in (report.error or "")
    assert error is not None or report.written.tags[0]["agent/retries"] == 2.0


# -- more rollouts than are needed


def test_of_extra_rollouts_those_that_complete_first_are_kept_and_the_rest_cancelled_and_counted() -> None:
    """Seeds 1 and 3 never end by themselves; their slots are free again, and the metrics say how long they were."""
    freed: list[int] = []

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        await loop.context.generate(GenerateRequest(request_id="r", prompt_ids=(1,)))
        if sampling["seed"] in (1, 3):
            try:
                await forever()
            finally:
                freed.append(sampling["seed"])
        return DONE

    reports = run_group(host(run), 4, extra=2)
    assert [0, 1, 2, 3] == [each.rollout for each in reports]
    assert [None] * 4 == [each.error for each in reports]
    assert [1, 3] == sorted(freed)
    counts = {name: number for each in reports for name, number in each.written.metrics.items()}
    assert {"dropped/rollouts": 2.0, "dropped/rollouts/to_2_tokens": 2.0} == counts
    assert [{"rollout": number} for number in range(4)] == [
        {"rollout": each.written.tags[0]["rollout"]} for each in reports
    ]


@pytest.mark.parametrize(("failing", "failed"), [({0, 4}, []), ({0, 1, 2}, [3]), ({0, 1, 2, 3, 4, 5}, [0, 1, 2, 3])])
def test_extra_rollouts_take_the_places_of_those_that_fail(failing: set[int], failed: list[int]) -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        if sampling["seed"] in failing:
            raise ConnectionError("away")
        return DONE

    reports = run_group(host(run), 4, extra=2)
    assert 4 == len(reports)
    assert len(failed) == sum(each.error is not None for each in reports)


def test_events_are_json() -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        loop.context.event("tool", result=object())
        return attrs.evolve(DONE, end_reason="answered")

    (report,) = run_group(host(run))
    assert "[agent.output]" in (report.error or "")
    assert json.dumps(report.error)


def test_a_loop_that_raises_a_cancellation_of_its_own_has_failed() -> None:
    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        raise asyncio.CancelledError

    (report,) = run_group(host(run))
    assert "[agent.failed]" in (report.error or "")
    assert "CancelledError" in (report.error or "")


def test_what_a_try_that_failed_has_noted_is_forgotten() -> None:
    tries: list[int] = []

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        tries.append(1)
        await loop.context.generate(GenerateRequest(request_id="r", prompt_ids=(1,)))
        loop.context.metric("calls", 1.0)
        if len(tries) < 3:
            raise ConnectionError("away")
        return DONE

    async def main() -> tuple[Any, Any]:
        (report,), values = await reports_of(host(run, retries=2))
        return report.written.tags[0], rows_of((await values.get("train", report.keys, ("task",)))["task"])[0]

    tags, task = asyncio.run(main())
    assert (1.0, 2.0) == (tags["agent/calls"], tags["agent/retries"])
    assert ["generate"] == [each["name"] for each in task["rollout"]["events"]]


def test_all_tries_of_a_rollout_share_its_deadline() -> None:
    deadlines: list[float | None] = []

    async def run(loop: Loop, sampling: Mapping[str, Any]) -> AgentLoopOutput:
        deadlines.append(loop.context.deadline)
        if len(deadlines) < 3:
            raise ConnectionError("away")
        return DONE

    assert [None] == [report.error for report in run_group(host(run, retries=2))]
    assert len(deadlines) == 3
    assert len({round(each or 0.0, 6) for each in deadlines}) == 1
