"""Reflection, and answers that are made of others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield_agent_workflow import BestOfWorkflow, ReflectOnceWorkflow, Task
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_testing import in_loop

from .flows import hosting, said

REFLECT, BEST = "jackfield_agent_workflow:ReflectOnceWorkflow", "jackfield_agent_workflow:BestOfWorkflow"


@pytest.mark.parametrize(
    ("train", "answers", "rewards"),
    [
        ("both", ["it is 3", "it is 4"], [0.0, 1.0]),
        ("first", ["it is 3", "it is 4"], [0.0]),
        ("second", ["it is 3", "it is 4"], [1.0]),
        ("improved", ["it is 3", "it is 4"], [0.0, 1.0]),
        ("improved", ["it is 3", "it is 5"], [0.0]),
        ("both", ["it is 4"], [1.0]),
    ],
)
@in_loop
async def test_what_is_trained_on_is_a_setting(
    tmp_path: Path, train: str, answers: list[str], rewards: list[float]
) -> None:
    """A right first answer needs no second one."""
    model = Model(answers, Letters())
    async with hosting(REFLECT, tmp_path, settings={"train": train}) as host:
        output = await host.run(model)
    assert rewards == [sequence.reward for sequence in output.sequences]
    assert len(answers) == len(model.calls)
    assert float(answers[-1][-1] == "4") == output.metrics["final_score"]
    if len(answers) > 1:
        assert said(model, 1) == "askit is 3Your answer is wrong. Think about it, and answer again."
    if len(rewards) > 1:
        assert (0, "sub_agent", "reflection") == (
            output.sequences[1].parent,
            output.sequences[1].relation,
            output.sequences[1].name,
        )


@in_loop
async def test_the_reflection_may_be_a_further_turn(tmp_path: Path) -> None:
    model = Model(["it is 3", "it is 4"], Letters())
    async with hosting(REFLECT, tmp_path, settings={"same_sequence": True}) as host:
        [sequence] = (await host.run(model)).sequences
    assert 1.0 == sequence.reward
    assert (*sequence.prompt_ids, *sequence.response_ids) == (
        *model.calls[1][0].prompt_ids,
        *model.calls[1][1].token_ids,
    )


class Own(ReflectOnceWorkflow):
    """Scores by length, with feedback of another model."""

    async def score(self, task: Task, text: str) -> float:
        return len(text) / 10

    async def feedback(self, task: Task, text: str, score: float) -> str:  # type: ignore[override]
        return f"{score:g} of 1"


@in_loop
async def test_score_and_feedback_may_be_changed(tmp_path: Path) -> None:
    model = Model(["12345", "1234567890"], Letters())
    async with hosting(Own, tmp_path) as host:
        output = await host.run(model)
    assert "ask123450.5 of 1" == said(model, 1)
    assert {"first_score": 0.5, "final_score": 1.0} == output.metrics


@pytest.mark.parametrize(
    ("settings", "rewards"),
    [
        ({"answers": 3}, [0.0, 1.0, 1.0]),
        ({"answers": 3, "train": "best"}, [1.0]),
        ({"answers": 3, "combine": True}, [0.0, 1.0, 1.0, 1.0]),
        ({"answers": 3, "combine": True, "train": "last"}, [1.0]),
    ],
)
@in_loop
async def test_several_answers_and_one_that_is_made_of_them(
    tmp_path: Path, settings: dict[str, Any], rewards: list[float]
) -> None:
    model = Model(["3", "4"], Letters())
    async with hosting(BEST, tmp_path, settings=settings) as host:
        output = await host.run(model)
    assert rewards == [sequence.reward for sequence in output.sequences]
    assert {model.requests[0].prompt_ids} == {request.prompt_ids for request in model.requests[:3]}
    if settings.get("combine"):
        assert said(model, 3) == "ask\nAnswer 1: 3\nAnswer 2: 4\nAnswer 3: 4\nGive the best answer."
    share = 200 // (3 + settings.get("combine", False))
    assert all(share >= request.sampling.max_new_tokens for request in model.requests[:3])


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (ReflectOnceWorkflow, {"train": "none"}),
        (ReflectOnceWorkflow, {"train": "first", "same_sequence": True}),
        (BestOfWorkflow, {"answers": 0}),
        (BestOfWorkflow, {"train": "first"}),
    ],
)
def test_wrong_settings_are_refused(cls: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"train|answers"):
        cls(**settings)
