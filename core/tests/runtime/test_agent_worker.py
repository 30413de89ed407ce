"""Tests of what an agent worker reports about a task in addition to samples."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import attrs
import pytest

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.workers import AgentWorker, RolloutJob


class Letters:
    """A tokenizer with one token per letter."""

    def encode_chat(self, messages: Any) -> tuple[int, ...]:
        return tuple(ord(letter) for letter in messages[-1]["content"])


@pytest.mark.parametrize(("most", "limit", "expected"), [(3, None, "abc"), (3, 2, "ab"), (9, 8, "abcd")])
def test_a_canary_is_no_longer_than_a_prompt_may_be(most: int, limit: int | None, expected: str) -> None:
    worker = AgentWorker(cast(Values, None), cast(ChatTokenizer, Letters()), Clock(), None, max_prompt_tokens=limit)
    task = Task(id="one", messages=({"role": "user", "content": "abcd"},))
    assert tuple(map(ord, expected)) == asyncio.run(worker.prompt_ids(task, most))


GOOD = AgentSequence(
    prompt_ids=(1, 2),
    response_ids=(3, 99),
    response_mask=(1, 0),
    response_log_probs=(-1.0, 0.0),
    weight_versions=(0, -1),
)


def reported(output: object) -> tuple[RolloutReport, RolloutReport]:
    """Return the reports of a good rollout, and of one whose agent returns ``output``."""

    class Agent:
        async def run(self, sampling_params: Any, **fields: Any) -> object:
            return output if sampling_params["seed"] else AgentLoopOutput(sequences=(GOOD,))

    async def main() -> tuple[RolloutReport, RolloutReport]:
        values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
        make = lambda _: cast(AgentLoopBase, Agent())  # noqa: E731
        worker = AgentWorker(values, cast(ChatTokenizer, Letters()), Clock(), make, vocabulary=100)
        task = Task(id="one", messages=({"role": "user", "content": "abcd"},))
        job = RolloutJob(group=GroupKey("train", 0, 0), task=task, rollouts={0: 0, 1: 1}, sampling={})
        found = [report async for reports in worker.run([job]) for report in reports]
        first, second = sorted(found, key=lambda report: report.rollout)
        return first, second

    return asyncio.run(main())


@pytest.mark.parametrize("value", [None, "an answer", 7, [GOOD], GOOD])
def test_what_is_no_output_of_an_agent_fails_its_rollout_and_names_the_type(value: object) -> None:
    good, bad = reported(value)
    assert (None, 1) == (good.error, len(good.keys))
    assert "agent.output" in str(bad.error)
    assert type(value).__name__ in str(bad.error)


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_ids": None},
        {"prompt_ids": ("a", "b")},
        {"prompt_ids": (1.5, 2)},
        {"response_ids": (3, 100)},
        {"response_ids": (-1, 3)},
        {"response_ids": (3, 2**70)},
        {"response_mask": (1, 2)},
        {"response_mask": (1, "1")},
        {"response_mask": (1, 300)},
        {"response_log_probs": ("low", "high")},
        {"response_log_probs": "ab"},
        {"weight_versions": ("0", "1")},
        {"weight_versions": 3},
        {"reward": "high"},
        {"step_id": "one"},
        {"finish_reason": 5},
    ],
    ids=str,
)
def test_a_field_of_a_wrong_type_fails_its_rollout_alone(fields: dict[str, Any]) -> None:
    good, bad = reported(AgentLoopOutput(sequences=(attrs.evolve(GOOD, **fields),)))
    assert (None, 1) == (good.error, len(good.keys))
    assert "agent.output" in str(bad.error), bad


@pytest.mark.parametrize("fields", [{"sequences": None}, {"sequences": ("text",)}, {"metrics": None}], ids=str)
def test_an_output_with_fields_of_wrong_types_fails_its_rollout_alone(fields: dict[str, Any]) -> None:
    good, bad = reported(AgentLoopOutput(**{"sequences": (GOOD,), **fields}))
    assert (None, 1) == (good.error, len(good.keys))
    assert "agent.output" in str(bad.error), bad
