"""Episodes in an environment: as one sequence, and as one sequence for each step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import AgentError
from jackfield_agent_workflow import MultiTurnWorkflow, Task
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_environments import Observation, Step
from jackfield_testing import in_loop

from .flows import hosting, said, shown_before

COUNTDOWN = {"name": "jackfield_agent_workflow.conformance:Countdown", "run": "inline"}
BASE = "jackfield_agent_workflow:MultiTurnWorkflow"


def asking(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]


@in_loop
async def test_a_rollout_is_one_sequence_with_a_reward_for_each_turn(tmp_path: Path) -> None:
    model = Model(["3", "2", "1"], Letters())
    async with hosting(BASE, tmp_path, environment=COUNTDOWN) as host:
        output = await host.run(model, messages=asking("Task: {observation} Now."), first=4)
    [sequence] = output.sequences
    assert "Be brief.Task: Count down from 4. Now." == said(model, 0)
    assert said(model, 2).endswith("3Go on.2Go on.")
    assert (3, "ended") == (output.num_turns, output.end_reason)
    assert sequence.token_rewards is not None
    assert (1.0, 2.0) == (sequence.reward, sum(sequence.token_rewards))
    expected = {"environment_steps": 3.0, "environment_reward": 3.0, "environment_ended": 1.0, "won": 1.0}
    assert expected == output.metrics


@pytest.mark.parametrize("history", [0, 1])
@in_loop
async def test_each_step_is_a_sequence_with_its_number(tmp_path: Path, history: int) -> None:
    """Its prompt is the observation, after ``history`` turns; its parent is the step before."""
    model = Model(["3", "2", "1"], Letters())
    settings = {"mode": "steps", "history": history}
    async with hosting(BASE, tmp_path, environment=COUNTDOWN, settings=settings) as host:
        output = await host.run(model, messages=asking("{observation}"), first=4)
    assert [0, 1, 2] == [sequence.step_id for sequence in output.sequences]
    assert [None, 0, 1] == [sequence.parent for sequence in output.sequences]
    assert [1.0, 1.0, 1.0] == [sequence.reward for sequence in output.sequences]
    assert [request.prompt_ids for request in model.requests] == [each.prompt_ids for each in output.sequences]
    before = ["", "Count down from 4.3", "Go on.2"] if history else ["", "", ""]
    seen = ["Count down from 4.", "Go on.", "Go on."]
    shown = [f"Be brief.{earlier}{here}" for earlier, here in zip(before, seen, strict=True)]
    assert shown == [said(model, number) for number in range(3)]


@in_loop
async def test_an_episode_ends_at_the_limit_of_steps(tmp_path: Path) -> None:
    async with hosting(BASE, tmp_path, environment=COUNTDOWN, settings={"max_steps": 2}) as host:
        output = await host.run(Model(["3", "2", "1"], Letters()), first=4)
    assert (2, "turns", 0.0) == (output.num_turns, output.end_reason, output.metrics["environment_ended"])
    assert 0.0 == output.metrics["won"]


@pytest.mark.parametrize("mode", ["concatenated", "steps"])
@in_loop
async def test_every_sequence_has_a_reward_when_the_budget_ends(tmp_path: Path, mode: str) -> None:
    model = Model(["3", "2", "1"], Letters())
    async with hosting(BASE, tmp_path, environment=COUNTDOWN, settings={"mode": mode}) as host:
        output = await host.run(model, {"max_new_tokens": 4}, first=4)
    assert ("budget", 2) == (output.end_reason, len(model.calls))
    assert all(sequence.reward is not None for sequence in output.sequences)
    assert 4 == sum(sum(sequence.response_mask) for sequence in output.sequences)


class Own(MultiTurnWorkflow):
    """Changes everything that can be changed."""

    def first_messages(self, task: Task, observation: Observation) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"<{observation.text}>"}]

    def next_messages(self, step: Step) -> list[dict[str, Any]]:
        return [{"role": "tool", "content": f"<{step.text}>"}]

    def parse_action(self, text: str) -> str:
        return text.partition("say ")[2]

    def step_reward(self, step: Step, turn: int) -> float:
        return step.reward * 10**turn

    def reset_fields(self, task: Task) -> dict[str, Any]:
        return {"first": task["begin"]}


@in_loop
async def test_prompts_actions_rewards_and_fields_may_be_changed(tmp_path: Path) -> None:
    model = Model(["say 2", "say 1"], Letters())
    async with hosting(Own, tmp_path, environment=COUNTDOWN) as host:
        [sequence] = (await host.run(model, begin=3)).sequences
    assert "<Count down from 3.>say 2<Go on.>" == said(model, 1)
    assert sequence.token_rewards is not None
    assert (10.0, 1.0) == (sequence.reward, sum(sequence.token_rewards))
    before = shown_before(model, 0)
    assert before == model.requests[1].prompt_ids[: len(before)]


@in_loop
async def test_all_rollouts_of_a_task_begin_alike(tmp_path: Path) -> None:
    """The seed is the task's field, or made of its id; the rollout's seed does not matter."""
    environment = {"name": "household", "run": "inline", "settings": {"max_steps": 2}}
    shown = []
    async with hosting(BASE, tmp_path, environment=environment) as host:
        for task, seed, rollout in (("a", None, 1), ("a", None, 2), ("b", None, 1), ("c", 7, 1), ("d", 7, 2)):
            model = Model(["look"], Letters())
            fields = {"task_id": task, **({} if seed is None else {"seed": seed})}
            await host.run(model, context={"seed": rollout}, **fields)
            shown.append(said(model, 0))
    one, again, other, seeded, seeded_again = shown
    assert one == again
    assert one != other
    assert seeded == seeded_again


class Breaks:
    def reset(self) -> str:
        return "Begin."

    def step(self, action: str) -> Any:
        raise ValueError("the bridge is down")


@in_loop
async def test_an_environment_that_fails_fails_the_rollout_by_name(tmp_path: Path) -> None:
    environment = {"name": f"{__name__}:Breaks", "run": "inline"}
    async with hosting(BASE, tmp_path, environment=environment) as host:
        with pytest.raises(AgentError) as caught:
            await host.run(Model(["go"], Letters()), task_id="train:3")
    assert "agent.environment" == caught.value.code
    assert "task train:3, step('go')" == caught.value.where
    assert "the bridge is down" in str(caught.value.found)


@pytest.mark.parametrize("settings", [{"max_steps": 0}, {"mode": "both"}, {"history": -1}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="max_steps"):
        MultiTurnWorkflow(**settings)
