"""Tests of what an agent worker reports about a task in addition to samples."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import attrs
import numpy as np
import pytest
import torch

from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence, ChatTokenizer
from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.config import make_config
from jackfield.data.formats import Task
from jackfield.errors import AgentError
from jackfield.plugins.hooks import SampleRecord
from jackfield.queue import Values
from jackfield.queue.meta import GroupKey, RolloutReport
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob
from jackfield.runtime.agents import AgentHost
from jackfield.sdk.arrays import unpack
from jackfield.sdk.cells import column_from_rows, json_column


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


def reported(output: object, **options: Any) -> tuple[RolloutReport, RolloutReport]:
    """Return the reports of a good rollout, and of one whose agent returns ``output``."""

    class Agent:
        async def run(self, sampling_params: Any, **fields: Any) -> object:
            return output if sampling_params["seed"] else AgentLoopOutput(sequences=(GOOD,))

    async def main() -> tuple[RolloutReport, RolloutReport]:
        values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
        host = AgentHost(make=lambda _: cast(AgentLoopBase, Agent()))
        worker = AgentWorker(values, cast(ChatTokenizer, Letters()), Clock(), host, vocabulary=100, **options)
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


@pytest.mark.parametrize(
    ("arrays", "inputs", "fails"),
    [
        (False, {"pixel_values": np.zeros((1, 3))}, True),
        (True, {"pixel_values": np.zeros((1, 3))}, False),
        (True, {}, False),
        (True, {"pixel_values": [0.0]}, True),
        (True, {7: np.zeros((1, 3))}, True),
    ],
    ids=["undeclared", "declared", "none", "no array", "no name"],
)
def test_inputs_beside_tokens_are_a_column_or_an_error(arrays: bool, inputs: Any, fails: bool) -> None:
    """Each sample of an agent with the capability has the column, also without images."""
    good, bad = reported(AgentLoopOutput(sequences=(attrs.evolve(GOOD, multi_modal_inputs=inputs),)), arrays=arrays)
    assert good.written is not None
    assert arrays == ("multi_modal_inputs" in good.written.columns)
    assert fails == ("agent.output" in str(bad.error)), bad


class Pictures(Letters):
    """Letters, and an array for each image."""

    def encode_multi_modal(self, messages: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
        return (9, 9, 5), {"pixel_values": np.ones((1, 3))}

    def encode_response(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))


@pytest.mark.parametrize("arrays", [True, False])
def test_answers_to_tasks_with_images_have_them(arrays: bool) -> None:
    """Supervised samples have the column, too; without the agent's capability the run ends."""

    async def main() -> dict[str, Any]:
        values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
        worker = AgentWorker(values, cast(ChatTokenizer, Pictures()), Clock(), None, arrays=arrays)
        content = [{"type": "image"}, {"type": "text", "text": "which?"}]
        task = Task(id="one", messages=({"role": "user", "content": content},), response="ab")
        [[report]] = [each async for each in worker.run([RolloutJob(group=GroupKey("train", 0, 0), task=task)])]
        return dict(await values.get("train", report.keys, ("prompt_ids", "multi_modal_inputs")))

    if not arrays:
        with pytest.raises(AgentError) as refused:
            asyncio.run(main())
        assert "agent.output" == refused.value.code
        return
    columns = asyncio.run(main())
    assert [9, 9, 5] == columns["prompt_ids"].values.tolist()
    assert np.array_equal(np.ones((1, 3)), unpack(columns["multi_modal_inputs"].values.numpy())["pixel_values"])


@pytest.mark.parametrize("fields", [{"sequences": None}, {"sequences": ("text",)}, {"metrics": None}], ids=str)
def test_an_output_with_fields_of_wrong_types_fails_its_rollout_alone(fields: dict[str, Any]) -> None:
    good, bad = reported(AgentLoopOutput(**{"sequences": (GOOD,), **fields}))
    assert (None, 1) == (good.error, len(good.keys))
    assert "agent.output" in str(bad.error), bad


@pytest.mark.parametrize("keeps", [False, True])
def test_each_token_keeps_the_version_that_made_it_if_the_run_asks_for_it(keeps: bool) -> None:
    """The column has -1 on tokens that are not the model's, whatever the agent says of them, and on given answers."""
    sequence = AgentSequence(
        prompt_ids=(1,),
        response_ids=(5, 6, 7, 8),
        response_mask=(1, 1, 0, 1),
        response_log_probs=(-1.0, -1.0, 0.0, -1.0),
        weight_versions=(3, 4, 4, 2**31 - 1),
    )

    class Agent:
        async def run(self, sampling_params: Any, **fields: Any) -> AgentLoopOutput:
            return AgentLoopOutput(sequences=(sequence,))

    class Words(Letters):
        end_token_ids = (0,)

        def encode_response(self, text: str) -> tuple[int, ...]:
            return tuple(ord(letter) for letter in text)

    async def main() -> list[tuple[str, list[int]]]:
        values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
        host = AgentHost(make=lambda _: cast(AgentLoopBase, Agent()))
        worker = AgentWorker(values, cast(ChatTokenizer, Words()), Clock(), host, versions=keeps)
        task = Task(id="one", messages=({"role": "user", "content": "abcd"},), response="xy")
        generated = RolloutJob(group=GroupKey("train", 0, 0), task=task, sampling={})
        expert = RolloutJob(group=GroupKey("train", 0, 1), task=task, expert=True)
        found = []
        for job in (generated, expert):
            (report,) = [report async for reports in worker.run([job]) for report in reports]
            assert keeps == ("weight_versions" in report.written.columns)
            if keeps:
                column = (await values.get("train", report.keys, ("weight_versions",)))["weight_versions"]
                found.append((str(column.values.dtype), column.values.tolist()))
        return found

    generated, expert = (3, 4, -1, 2**31 - 1), (-1, -1)
    expected = [("torch.int32", list(generated)), ("torch.int32", list(expert))] if keeps else []
    assert expected == asyncio.run(main())


@pytest.mark.parametrize(
    ("override", "keeps"),
    [
        ("seed=1", False),
        ("schedule.mode=sync", False),
        ("schedule.mode=async", True),
        ("schedule.partial_rollout=true", True),
    ],
)
def test_a_run_asks_for_versions_where_responses_mix_them(override: str, keeps: bool) -> None:
    assert keeps == make_config({"model": {"path": "somewhere"}}, [override]).keeps_token_versions


@pytest.mark.parametrize("generated", [True, False])
def test_a_record_has_what_a_trace_shows_of_its_tokens(generated: bool) -> None:
    """A sample without some of these columns, such as an answer from the data, has a record, too."""
    columns = {
        "prompt_ids": column_from_rows([torch.tensor([97])]),
        "response_ids": column_from_rows([torch.tensor([98, 99])]),
        "response_mask": column_from_rows([torch.tensor([True, False])]),
        "reward": column_from_rows([torch.tensor([0.25, 0.5])]),
    }
    if generated:
        columns |= {
            "rollout_log_probs": column_from_rows([torch.tensor([-0.1, 0.0])]),
            "weight_versions": column_from_rows([torch.tensor([4, -1], dtype=torch.int32)]),
            "task": json_column(
                [{"data_source": "d", "rollout": {"turns": 2, "events": [{"name": "tool", "at": 0.5}]}}]
            ),
        }

    class Words(Letters):
        def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, token_ids))

    async def main() -> SampleRecord:
        values = Values(MemoryBackend(MemoryConfig(), TransferQueueContext()))
        await values.put("train", ["k"], columns)
        worker = AgentWorker(values, cast(ChatTokenizer, Words()), Clock(), None, versions=True)
        return (await worker.records("train", ["k"], [{"task": "one"}], with_reward=True))[0]

    record = asyncio.run(main())
    assert ("a", "bc", 0.75, (0.25, 0.5)) == (record.prompt, record.response, record.reward, record.token_rewards)
    made = (record.log_probs, record.weight_versions, record.rollout)
    expected = ((-0.1, 0.0), (4, -1), {"turns": 2, "events": [{"name": "tool", "at": 0.5}]})
    assert (expected if generated else ((), (), {})) == made
