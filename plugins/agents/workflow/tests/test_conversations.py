"""What ``model.chat`` makes of conversations: one sequence that grows, branches, and other agents."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from jackfield.errors import AgentError
from jackfield_agent_workflow import Reply, RolloutEnded, Task, Workflow
from jackfield_conformance.support.agent_model import Letters, Model
from jackfield_testing import in_loop

from .flows import MESSAGES, hosting, said, shown_before


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


class Continues(Workflow):
    async def run(self, task: Task) -> None:
        messages = task.messages
        for text in ("more", "and more"):
            reply = await self.model.chat(messages)
            self.reward(0.25, reply)
            messages = [*messages, reply.message, user(text)]
        self.reward(1.0, await self.model.chat(messages))


@in_loop
async def test_a_conversation_goes_on_in_its_own_tokens(tmp_path: Path) -> None:
    """Three turns are one sequence; each request begins with the tokens of the one before and its answer."""
    model = Model(["one", "two", "three"], Letters())
    async with hosting(Continues, tmp_path) as host:
        output = await host.run(model)
    [sequence] = output.sequences
    assert 3 == output.num_turns
    for number in (0, 1):
        before = shown_before(model, number)
        assert before == model.requests[number + 1].prompt_ids[: len(before)]
    assert (*sequence.prompt_ids, *sequence.response_ids) == shown_before(model, 2)
    assert sum(len(result.token_ids) for _, result in model.calls) == sum(sequence.response_mask)
    assert sequence.reward == 1.0
    assert sequence.token_rewards is not None
    assert [0.25, 0.25] == [value for value in sequence.token_rewards if value]
    ends = [index for index, value in enumerate(sequence.token_rewards) if value]
    assert all(sequence.response_mask[end] == 1 and sequence.response_mask[end + 1] == 0 for end in ends)
    assert "answered" == output.end_reason


class Branches(Workflow):
    async def run(self, task: Task) -> None:
        first = await self.model.chat(task.messages)
        history = [*task.messages, first.message]
        left = await self.model.chat([*history, user("left")])
        right = await self.model.chat([*history, user("right")])
        self.reward(0.0, left)
        self.reward(1.0, right)


@in_loop
async def test_another_continuation_is_a_branch(tmp_path: Path) -> None:
    """What both have in common is trained on once, and is not tokenised again."""
    model = Model(["one", "two", "three"], Letters())
    async with hosting(Branches, tmp_path) as host:
        output = await host.run(model)
    trunk, branch = output.sequences
    assert (None, 0, "branch") == (trunk.parent, branch.parent, branch.relation)
    assert shown_before(model, 0) == branch.prompt_ids
    assert branch.prompt_ids == model.requests[2].prompt_ids[: len(branch.prompt_ids)]
    assert len(model.calls[2][1].token_ids) == sum(branch.response_mask)
    assert (0.0, 1.0) == (trunk.reward, branch.reward)


class Parallel(Workflow):
    async def run(self, task: Task) -> None:
        first = await self.model.chat(task.messages)
        history = [*task.messages, first.message]
        replies = await asyncio.gather(*[self.model.chat([*history, user(text)]) for text in "abc"])
        for number, reply in enumerate(replies):
            self.reward(number, reply)


@in_loop
async def test_continuations_at_the_same_time_are_branches(tmp_path: Path) -> None:
    model = Model(["one", "two"], Letters())
    async with hosting(Parallel, tmp_path) as host:
        output = await host.run(model)
    assert 3 == len(output.sequences)
    assert {0.0, 1.0, 2.0} == {sequence.reward for sequence in output.sequences}
    trained = [
        token
        for each in output.sequences
        for token, own in zip(each.response_ids, each.response_mask, strict=True)
        if own and token != model.tokenizer.end_token_ids[0]
    ]
    assert len(trained) == len(set(trained)), "no token is trained on twice"


class Team(Workflow):
    async def run(self, task: Task) -> None:
        plan = await self.agent("planner").chat(task.messages)
        answer = await self.agent("solver").chat(f"Plan: {plan.text}")
        again = await self.agent("planner").chat([*task.messages, plan.message, user(answer.text)])
        self.reward(0.5, answer)
        self.reward(1.0, again)


@in_loop
async def test_agents_have_conversations_names_and_parents(tmp_path: Path) -> None:
    model = Model(["plan", "solve", "done"], Letters())
    async with hosting(Team, tmp_path) as host:
        output = await host.run(model)
    planner, solver = output.sequences
    assert ("planner", None, None) == (planner.name, planner.parent, planner.relation)
    assert ("solver", 0, "sub_agent") == (solver.name, solver.parent, solver.relation)
    assert "Plan: plan" in said(model, 1)
    assert (1.0, 0.5) == (planner.reward, solver.reward)
    assert 3 == output.num_turns


class Same(Workflow):
    async def run(self, task: Task) -> None:
        for number in range(2):
            self.reward(number, await self.model.chat(task.messages))
        edited = [*task.messages, {"role": "assistant", "content": "never said"}, user("go on")]
        self.leave_out(await self.model.chat(edited))


@in_loop
async def test_other_conversations_are_sequences_of_their_own(tmp_path: Path) -> None:
    """The same prompt again, and a history that the model has not written, which is left out here."""
    model = Model(["one"], Letters())
    async with hosting(Same, tmp_path) as host:
        output = await host.run(model)
    assert [0.0, 1.0] == [sequence.reward for sequence in output.sequences]
    assert output.sequences[0].prompt_ids == output.sequences[1].prompt_ids
    assert "never said" in said(model, 2)


class Endless(Workflow):
    async def run(self, task: Task) -> None:
        messages = task.messages
        while True:
            reply = await self.model.chat(messages)
            messages = [*messages, reply.message, user("more")]


@pytest.mark.parametrize(("options", "asked"), [({}, [12, 8, 4]), ({"turn_tokens": 5}, [5, 5, 4])])
@in_loop
async def test_the_budget_is_that_of_the_rollout(tmp_path: Path, options: dict[str, int], asked: list[int]) -> None:
    """All answers together have ``max_new_tokens``; then the rollout ends, visibly."""
    model = Model(["one"], Letters())  # four tokens with the end
    async with hosting(Endless, tmp_path, **options) as host:
        output = await host.run(model, {"max_new_tokens": 12})
    assert asked == [request.sampling.max_new_tokens for request in model.requests]
    assert "budget" == output.end_reason
    assert [12] == [sum(sequence.response_mask) for sequence in output.sequences]


class Together(Workflow):
    async def run(self, task: Task) -> None:
        asked = [self.model.chat(task.messages) for _ in range(3)]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        self.metric("answers", sum(isinstance(each, Reply) for each in replies))


@pytest.mark.parametrize(("tokens", "answers"), [(12, 3), (8, 2)])
@in_loop
async def test_answers_at_the_same_time_share_the_budget(tmp_path: Path, tokens: int, answers: int) -> None:
    """One that finds nothing left waits for what others do not use."""
    model = Model(["one"], Letters())
    async with hosting(Together, tmp_path) as host:
        output = await host.run(model, {"max_new_tokens": tokens})
    assert {"answers": float(answers)} == output.metrics
    assert tokens >= sum(len(result.token_ids) for _, result in model.calls)


@in_loop
async def test_the_context_ends_a_conversation(tmp_path: Path) -> None:
    model = Model(["one"], Letters())
    async with hosting(Endless, tmp_path, on_overflow="end") as host:
        output = await host.run(model, context={"max_model_len": 30})
    assert "budget" == output.end_reason
    assert all(30 >= len(shown_before(model, number)) for number in range(len(model.calls)))


class Catches(Workflow):
    async def run(self, task: Task) -> None:
        try:
            await self.model.chat(task.messages)
        except RolloutEnded as ended:
            self.metric(ended.reason, 1)
            self.reward(0.5)
            with pytest.raises(RolloutEnded):
                await self.model.chat("again")
            raise


@in_loop
async def test_an_aborted_answer_ends_the_rollout(tmp_path: Path) -> None:
    model = Model(["one"], Letters(), abort_at=0, abort_tokens=2)
    async with hosting(Catches, tmp_path) as host:
        output = await host.run(model)
    assert ("aborted", {"aborted": 1.0}) == (output.end_reason, output.metrics)
    assert [("abort", 0.5)] == [(each.finish_reason, each.reward) for each in output.sequences]


class Late(Workflow):
    async def run(self, task: Task) -> None:
        first = await self.model.chat(task.messages)
        await self.model.chat([*task.messages, first.message, user("more")])
        self.reward(1.0, first)


class Early(Workflow):
    async def run(self, task: Task) -> None:
        self.reward(1.0)


@pytest.mark.parametrize("workflow", [Late, Early])
@in_loop
async def test_rewards_without_a_newest_answer_are_refused(tmp_path: Path, workflow: type[Workflow]) -> None:
    async with hosting(workflow, tmp_path) as host:
        with pytest.raises(AgentError) as caught:
            await host.run(Model(["one"], Letters()))
    assert "agent.failed" == caught.value.code


class LongTexts(Workflow):
    async def run(self, task: Task) -> None:
        first = await self.model.chat(task.messages)
        await self.agent("reader").chat(first.text * 10)


@in_loop
async def test_a_prompt_that_the_model_made_too_long_ends_only_the_rollout(tmp_path: Path) -> None:
    """It is no error of the data, which would end the run."""
    async with hosting(LongTexts, tmp_path) as host:
        output = await host.run(Model(["words"], Letters()), context={"max_prompt_tokens": 20})
    assert "budget" == output.end_reason
    assert 1 == len(output.sequences)


class Metrics(Workflow):
    async def run(self, task: Task) -> None:
        self.metric("looks", 1)
        self.metric("looks", 2)
        await self.model.chat(task.messages)


@in_loop
async def test_without_rewards_the_reward_agent_scores(tmp_path: Path) -> None:
    async with hosting(Metrics, tmp_path) as host:
        output = await host.run(Model(["one"], Letters()))
    [sequence] = output.sequences
    assert (None, None, {"looks": 3.0}) == (sequence.reward, sequence.token_rewards, output.metrics)
    assert MESSAGES == [{"role": "user", "content": "ask"}]
