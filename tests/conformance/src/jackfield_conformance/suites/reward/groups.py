"""Checks of groups, and of what a reward tells its host: version, turns and deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import AsyncIterator, Callable

import attrs

from jackfield.abc.reward import ResponsePart, RewardAgent, ScoreResult
from jackfield_conformance.registry import NotApplicable, Subject, check
from jackfield_conformance.support import reward as support
from jackfield_conformance.support.reward import (
    PAGE,
    assert_result,
    assert_same,
    cancel_after,
    examples,
    opened,
    requests_of,
    score,
    scores,
    text_of,
)


@check("REW-025", since="1.1", page=PAGE + "requests", using=opened)
async def what_is_told_of_a_rollout_is_tolerated(subject: Subject, agent: RewardAgent) -> None:
    """A request with everything that a host knows of a rollout is scored."""
    for request in examples(subject):
        more = attrs.evolve(
            request,
            group_id="train/3/1/0",
            group_size=4,
            messages=({"role": "user", "content": [{"type": "text", "text": request.prompt_str or "What is it?"}]},),
            parts=(ResponsePart(author="model", text=request.solution_str), ResponsePart(author="tool", text="")),
            turns=2,
            metrics={"conformance": 1.0},
            tool_calls=({"name": "conformance", "arguments": {}},),
            images=({"type": "image_url", "image_url": {"url": "data:,"}},),
            priority=3,
        )
        plain, found = await score(agent, request), await score(agent, more)
        assert_result(found, more)
        assert plain.status == found.status, f"without: {text_of(plain)}; with it: {text_of(found)}"


@check("REW-026", since="1.1", page=PAGE + "caching")
async def the_version_is_that_of_the_scores(subject: Subject) -> None:
    """Two agents with the same settings have one version, a text, or none; it does not change while they score."""
    async with opened(subject) as agent, opened(subject) as other:
        first = agent.version
        assert first is None or (isinstance(first, str) and first), f"the version is {first!r}, expected a text or None"
        await score(agent, examples(subject)[0])
        assert first == agent.version, f"before a score {first!r}, after it {agent.version!r}"
        assert first == other.version, f"one agent has the version {first!r}, another one {other.version!r}"


@check("REW-027", since="1.1", page=PAGE + "groups", using=opened)
async def a_group_has_a_result_for_each(subject: Subject, agent: RewardAgent) -> None:
    """A group gets one result for each of its requests, in their order; alone, it gets the scores of its samples."""
    asked = examples(subject)
    found = list(await agent.score_group(asked))
    assert len(asked) == len(found), f"{len(asked)} requests went in, {len(found)} results came out"
    for request, result in zip(asked, found, strict=True):
        assert_result(result, request)
    if agent.compares or subject.has("post_process"):
        return
    for request, result in zip(asked, found, strict=True):
        assert_same(await score(agent, request), result, "alone", "in its group")


@check("REW-030", capability="post_process", page=PAGE + "groups", using=opened)
async def groups_keep_their_length_and_order(subject: Subject, agent: RewardAgent) -> None:
    """Post-processing returns one result per rollout of the group, each at the place of its rollout."""
    for group in _groups():
        before = copy.deepcopy(group)
        found = list(agent.post_process_scores(tuple(group)))
        assert len(group) == len(found), f"{len(group)} results went in, {len(found)} came out"
        assert before == group, "post-processing changed the results that it was given"
        for result in found:
            assert_result(result, what="a result of post-processing")
        backwards = list(agent.post_process_scores(tuple(reversed(group))))
        expected = [text_of(result) for result in reversed(found)]
        turned = [text_of(result) for result in backwards]
        assert expected == turned, f"a group in reverse: expected {expected}, found {turned}"


@check("REW-031", capability="post_process", page=PAGE + "groups")
async def groups_do_not_mix(subject: Subject) -> None:
    """Post-processing a group depends on this group alone."""
    async with opened(subject) as agent:
        forwards = [[text_of(each) for each in agent.post_process_scores(tuple(group))] for group in _groups()]
    async with opened(subject) as agent:
        backwards = [[text_of(each) for each in agent.post_process_scores(tuple(group))] for group in _groups()[::-1]]
    assert forwards == backwards[::-1], f"groups in order: {forwards}; in reverse order: {backwards[::-1]}"


@check("REW-032", capability="token_scores", page=PAGE + "scores", using=opened)
async def token_scores_are_there(subject: Subject, agent: RewardAgent) -> None:
    """An agent that declares token scores yields one per response token."""
    found = 0
    for number, request in enumerate(examples(subject)):
        ids = request.response_ids or tuple(range(3 + number))
        result = await score(agent, attrs.evolve(request, response_ids=ids))
        if result.token_scores is not None:
            found += 1
            assert len(ids) == len(result.token_scores), f"{len(result.token_scores)} scores for {len(ids)} tokens"
    assert found, "token_scores is declared, and no example yields any"


@check("REW-033", since="1.1", capability="compares", page=PAGE + "groups")
async def comparisons_do_not_depend_on_the_order(subject: Subject) -> None:
    """A group in another order gets the same scores, each at the place of its request."""
    settings = subject.fixture.get("comparing") or {}
    async with opened(subject, settings) as agent:
        if not agent.compares:
            raise NotApplicable("these settings compare nothing: give others as 'comparing' of the fixture")
        asked = [attrs.evolve(each, idempotency_key=f"group/{n}") for n, each in enumerate(examples(subject))]
        forwards, backwards = list(await agent.score_group(asked)), list(await agent.score_group(asked[::-1]))
    assert len(asked) == len(forwards) == len(backwards), f"{len(asked)} requests, {len(forwards)} results"
    for request, one, other in zip(asked, forwards, reversed(backwards), strict=True):
        assert one.status == "ok", f"{request.solution_str[:40]!r}: {text_of(one)}"
        same = other.status == "ok" and math.isclose(one.score or 0.0, other.score or 0.0, rel_tol=1e-6)
        assert same, f"{request.solution_str[:40]!r}: {text_of(one)}; with the group in reverse: {text_of(other)}"


@check("REW-034", since="1.1", capability="turns", page=PAGE + "concurrency")
async def turns_are_taken_and_given_back(subject: Subject) -> None:
    """Each score takes a turn at least, one at a time if there is only one, and gives all of them back."""
    free, taken = asyncio.Semaphore(1), 0

    @contextlib.asynccontextmanager
    async def turn() -> AsyncIterator[Callable[[int], None]]:
        nonlocal taken
        async with free:
            taken += 1
            yield lambda tokens: None

    async with opened(subject, turn=turn) as agent:
        asked = [attrs.evolve(each, idempotency_key=f"turns/{n}") for n, each in enumerate(examples(subject))]
        await scores(agent, asked)
        assert taken >= len(asked), f"{len(asked)} scores took {taken} turns"
        await cancel_after(agent, asked[0], 5)
        assert not free.locked(), "a turn was not given back"


@check("REW-035", since="1.1", capability="keeps_deadlines", page=PAGE + "deadlines", using=opened)
async def it_ends_a_call_itself(subject: Subject, agent: RewardAgent) -> None:
    """An agent that keeps deadlines answers ``timeout`` soon after one."""
    for request in requests_of(subject, "slow", needed=True):
        asked = attrs.evolve(request, deadline_seconds=support.SLOW_DEADLINE)
        waiting = asyncio.ensure_future(agent.compute_score(asked))
        done, _ = await asyncio.wait([waiting], timeout=support.SLOW_DEADLINE + support.GRACE)
        waiting.cancel()
        await asyncio.wait([waiting], timeout=support.GRACE)
        assert done, f"no answer {support.GRACE} s after the deadline of {support.SLOW_DEADLINE} s"
        assert waiting.result().status == "timeout", f"the answer is {text_of(waiting.result())}"


def _groups() -> list[list[ScoreResult]]:
    def ok(number: float) -> ScoreResult:
        return ScoreResult(score=number)

    lost = ScoreResult(status="failed", error="no answer")
    late = ScoreResult(status="timeout", error="too late")
    return [[ok(0.0), ok(3.0), ok(1.0), ok(2.0)], [ok(5.0), lost, ok(7.0), late], [lost, late], [ok(1.0)], []]
