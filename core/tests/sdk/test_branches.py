"""Branches of a conversation: what the model saw and said is their prompt, token by token."""

from __future__ import annotations

import asyncio

from jackfield.abc.agent import AgentContext
from jackfield.abc.rollout import GenerateRequest
from jackfield.sdk.sequences import SequenceBuilder, sequences_of
from jackfield_conformance.support.agent_model import Letters, Model


def test_a_branch_begins_after_an_earlier_answer() -> None:
    """Its prompt is the history up to that answer, also beyond the limit of prompts; no token is trained on twice."""

    async def main() -> None:
        model = Model(["first", "second", "other"], Letters())
        tokenizer = model.tokenizer
        context = AgentContext(generate=model, tokenizer=tokenizer, max_prompt_tokens=8)
        builder = SequenceBuilder(context, {}, [{"role": "user", "content": "ask"}])
        await builder.generate()
        assert builder.append_turn([{"role": "user", "content": "a long turn of the user"}])
        await builder.generate()
        branch = builder.branch(name="retry", turn=1)
        assert ["ask"] == [each["content"] for each in branch.messages]
        assert branch.append_turn([{"role": "user", "content": "again"}])
        await branch.generate()
        first, second, third = (request for request, _ in model.calls)
        said = model.calls[0][1].token_ids
        assert (*first.prompt_ids, *said) == third.prompt_ids[: len(first.prompt_ids) + len(said)]
        one, other = sequences_of([builder, branch])
        assert (None, 0, "branch", "retry") == (one.parent, other.parent, other.relation, other.name)
        assert (*first.prompt_ids, *said) == other.prompt_ids
        assert _own(one.response_ids, one.response_mask).isdisjoint(_own(other.response_ids, other.response_mask))
        assert _is_prefix(second, one.prompt_ids)

    asyncio.run(main())


def test_a_branch_goes_on_from_the_last_answer() -> None:
    async def main() -> None:
        model = Model(["first", "second"], Letters())
        context = AgentContext(generate=model, tokenizer=model.tokenizer)
        builder = SequenceBuilder(context, {"max_new_tokens": 20}, [{"role": "user", "content": "ask"}])
        await builder.generate()
        branch = builder.branch()
        assert builder.left == branch.left
        assert branch.append_turn([{"role": "user", "content": "go on"}])
        assert builder.append_turn([{"role": "user", "content": "go on"}])
        await branch.generate()
        await builder.generate()
        assert model.requests[1].prompt_ids == model.requests[2].prompt_ids

    asyncio.run(main())


def _own(ids: tuple[int, ...], mask: tuple[int, ...]) -> set[int]:
    return {token for token, own in zip(ids, mask, strict=True) if own and token > Letters().end_token_ids[0]}


def _is_prefix(request: GenerateRequest, prompt: tuple[int, ...]) -> bool:
    return prompt == request.prompt_ids[: len(prompt)]
