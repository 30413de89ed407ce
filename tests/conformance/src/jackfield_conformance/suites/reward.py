"""Checks of reward agents.

The plugin's fixture may have, beside ``settings``, lists of mappings with fields of a ``ScoreRequest``:

* ``examples``: requests that can be scored, each perhaps with its ``score``; the default is a sum;
* ``failing``: requests without a score, such as a broken ground truth;
* ``slow``: requests that take half a minute or longer unless they are cancelled.

Checks that need ``failing`` or ``slow`` do not apply without them. ``context`` has fields of a ``RewardContext``, such
as a ``generate`` function, that the plugin needs beside an HTTP client and the installed rewards.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
from collections.abc import AsyncIterator, Callable

import attrs

from jackfield.abc.reward import ResponsePart, RewardAgent, ScoreRequest, ScoreResult
from jackfield_conformance.registry import Capability, NotApplicable, Subject, check
from jackfield_conformance.support.expecting import assert_no_tasks, cancelled
from jackfield_conformance.support.processes import adopting, assert_nothing_left, descendants, names, remaining
from jackfield_conformance.support.reward import (
    Unreadable,
    assert_result,
    context_of,
    examples,
    expected_scores,
    opened,
    requests_of,
    score,
    scores,
)

_PAGE = "docs/plugins/reward.md#"

#: Seconds until a cancelled call, or the processes of a closed agent, have ended.
_GRACE = 5.0

#: The deadline of a slow request, in seconds.
_SLOW_DEADLINE = 0.5

#: Numbers of turns of the event loop before a call is cancelled.
_TURNS = (0, 1, 2, 5)

#: Unexpected answers.
_ODD_ANSWERS = ("", " \n\t", "#### ", "-" * 20_000, "四 \u200b\U0001f600 \u0000", "{'score': NaN} \\boxed{1}")


CAPABILITIES = {
    "post_process": Capability(
        what="adjusts the scores of whole groups",
        detect=lambda subject: subject.cls.post_process_scores is not RewardAgent.post_process_scores,
    ),
    "token_scores": Capability(what="yields a score per response token"),
    "compares": Capability(
        what="scores whole groups: comparisons, rankings, diversity",
        detect=lambda subject: subject.cls.score_group is not RewardAgent.score_group,
    ),
    "turns": Capability(
        what="takes a turn within the limits of the service for each of its requests",
        detect=lambda subject: subject.cls.takes_turns is not RewardAgent.takes_turns,
    ),
    "keeps_deadlines": Capability(
        what="ends a call at its deadline itself",
        detect=lambda subject: subject.cls.keeps_deadlines is not RewardAgent.keeps_deadlines,
    ),
}


@check("REW-010", page=_PAGE + "scores", using=opened)
async def examples_are_scored(subject: Subject, agent: RewardAgent) -> None:
    """A sample that can be scored gets the status ok and its score."""
    for request, expected in zip(examples(subject), expected_scores(subject), strict=True):
        result = await score(agent, request)
        answer = f"{request.solution_str!r} for {request.ground_truth!r}"
        hint = "give requests that can be scored as 'examples' of the fixture"
        assert result.status == "ok", f"{answer}: {result.status}, {result.error}; {hint}"
        if expected is not None:
            close = math.isclose(expected, result.score or 0.0, rel_tol=1e-6, abs_tol=1e-9)
            assert close, f"{answer}: expected {expected}, found {result.score}"


@check("REW-011", page=_PAGE + "scores", using=opened)
async def results_are_well_formed(subject: Subject, agent: RewardAgent) -> None:
    """Whatever the answer is, the result is a finite score, or a status with a reason and no score."""
    for request in examples(subject):
        for answer in (request.solution_str, *_ODD_ANSWERS):
            ids = tuple(range(len(answer.split()) + 1))
            asked = attrs.evolve(request, solution_str=answer, response_ids=ids)
            result = await score(agent, asked)
            assert_result(result, asked, f"the result for the answer {answer[:40]!r}")
            if result.token_scores is not None:
                declared = subject.has("token_scores")
                assert declared, "it yields token scores, and its manifest does not declare token_scores"


@check("REW-012", page=_PAGE + "failures", using=opened)
async def a_failure_is_no_score(subject: Subject, agent: RewardAgent) -> None:
    """A failure is a status with its reason, or a raised error, and never a score."""
    for request in examples(subject)[:1]:
        fields = attrs.asdict(request, recurse=False)
        unreadable = Unreadable(**fields)
        result = await score(agent, unreadable)
        swallowed = unreadable.was_read and result.status == "ok"
        assert not swallowed, f"an error was raised while it scored; the result is ok, score {result.score!r}"
        assert_result(result, what="the result of a call in which an error was raised")
    for request in requests_of(subject, "failing"):
        result = await score(agent, request)
        assert_result(result, request)
        assert result.status != "ok", f"{request.ground_truth!r} cannot be scored; the score is {result.score!r}"


@check("REW-013", page=_PAGE + "retries", using=opened)
async def a_retry_gets_the_same_answer(subject: Subject, agent: RewardAgent) -> None:
    """A retry of a sample, with the same idempotency key, gets the first answer."""
    for request in examples(subject):
        first = await score(agent, request)
        again = await score(agent, attrs.evolve(request, retry=1))
        _assert_same(first, again, "at first", "at the retry")


@check("REW-014", page=_PAGE + "retries", using=opened)
async def a_retry_after_a_cancelled_attempt(subject: Subject, agent: RewardAgent) -> None:
    """A retry after a cancelled first call scores the sample as if there had been no first call."""
    request = examples(subject)[0]
    untouched = await score(agent, attrs.evolve(request, idempotency_key="untouched"))
    for turns in _TURNS:
        mine = attrs.evolve(request, idempotency_key=f"cancelled/{turns}")
        await _cancelled(agent, mine, turns)
        again = await score(agent, attrs.evolve(mine, retry=1))
        _assert_same(untouched, again, "untouched", "after a cancelled attempt")


@check("REW-015", page=_PAGE + "concurrency", using=opened)
async def many_at_once(subject: Subject, agent: RewardAgent) -> None:
    """Samples that are scored concurrently get the same scores as one by one."""
    asked = examples(subject)
    alone = [await score(agent, request) for request in asked]
    for round in range(4):
        order = [(round + number) % len(asked) for number in range(4 * len(asked))]
        together = await scores(
            agent, [attrs.evolve(asked[index], idempotency_key=f"{round}/{n}") for n, index in enumerate(order)]
        )
        for index, found in zip(order, together, strict=True):
            _assert_same(alone[index], found, "alone", f"among {len(order)}")


@check("REW-016", page=_PAGE + "deadlines", using=opened)
async def a_cancelled_call_ends(subject: Subject, agent: RewardAgent) -> None:
    """A cancelled call ends at once and leaves no task behind."""
    quick = examples(subject)[0]
    for request in [quick, *requests_of(subject, "slow")]:
        await score(agent, quick)
        before = asyncio.all_tasks()
        for turns in _TURNS:
            await _cancelled(agent, request, turns)
            assert_no_tasks(before, "after a cancelled call")


@check("REW-017", page=_PAGE + "deadlines")
async def a_deadline_ends_what_was_started(subject: Subject) -> None:
    """A deadline ends a slow call and the processes that it started."""
    slow, others = requests_of(subject, "slow", needed=True), descendants()  # others may end at any moment
    with adopting():
        async with opened(subject) as agent:
            for request in slow:
                await score(agent, examples(subject)[0])
                before = descendants() - others
                result = await score(agent, attrs.evolve(request, deadline_seconds=_SLOW_DEADLINE))
                assert_result(result, request)
                assert result.status != "ok", f"a slow request was scored within {_SLOW_DEADLINE} s: is it slow?"
                left = await asyncio.to_thread(remaining, descendants() - before - others, _GRACE)
                more = len(left) - len(before - descendants())  # a worker that was replaced is no leak
                assert more <= 0, f"processes that continue after the deadline: {names(left)}"


@check("REW-018", page=_PAGE + "concurrency", using=opened)
async def the_event_loop_goes_on(subject: Subject, agent: RewardAgent) -> None:
    """The event loop keeps running while one sample takes long."""
    slow = requests_of(subject, "slow", needed=True)[0]
    await score(agent, examples(subject)[0])
    waiting = asyncio.create_task(score(agent, slow))
    try:
        await asyncio.sleep(0)  # the call starts, and returns here when it waits or has ended
        assert not waiting.done(), "a slow request ended before anything else ran: it blocks the event loop"
    finally:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


@check("REW-019", page=_PAGE + "life")
def close_leaves_nothing(subject: Subject) -> None:
    """After ``close`` an agent leaves no task, thread, process, socket, shared memory or file."""

    async def life(_: object) -> None:
        async with opened(subject) as agent:
            await scores(agent, examples(subject))
            await _cancelled(agent, examples(subject)[0], 2)

    assert_nothing_left(life, subject.folder / "lives")


@check("REW-020", page=_PAGE + "life")
async def start_and_close_may_be_repeated(subject: Subject) -> None:
    """``start`` and ``close`` may be called twice, and ``close`` without ``start``."""
    request = examples(subject)[0]
    async with context_of(subject) as context:
        unused: RewardAgent = subject.make(context)
        await unused.close()
        agent: RewardAgent = subject.make(context)
        try:
            await agent.start()
            first = await score(agent, request)
            await agent.start()
            again = await score(agent, request)
            _assert_same(first, again, "before a second start", "after it")
            await agent.close()
        finally:
            await agent.close()


@check("REW-021", page=_PAGE + "life", using=opened)
async def agents_share_nothing(subject: Subject, agent: RewardAgent) -> None:
    """Two agents in one process share nothing: closing one does not affect the other."""
    request = examples(subject)[0]
    first = await score(agent, request)
    async with opened(subject) as other:
        beside = await score(other, request)
        _assert_same(first, beside, "one", "the other")
    after = await score(agent, attrs.evolve(request, idempotency_key="after"))
    _assert_same(first, after, "before the other was closed", "after")


@check("REW-022", page=_PAGE + "requests", using=opened)
async def requests_are_left_alone(subject: Subject, agent: RewardAgent) -> None:
    """Scoring a request does not change it."""
    for request in examples(subject):
        extra = {**copy.deepcopy(dict(request.extra_info)), "conformance": {"list": [1, 2]}}
        asked = attrs.evolve(request, extra_info=extra)
        before = copy.deepcopy(attrs.asdict(asked, recurse=False))
        await score(agent, asked)
        after = attrs.asdict(asked, recurse=False)
        changed = [name for name in before if before[name] != after[name]]
        assert not changed, f"changed by compute_score: {changed}"


@check("REW-023", page=_PAGE + "requests", using=opened)
async def further_fields_are_tolerated(subject: Subject, agent: RewardAgent) -> None:
    """Fields of a task that the agent does not know change no score."""
    for request in examples(subject):
        plain = await score(agent, request)
        extra = {**request.extra_info, "conformance_unknown": ["field", 1, None]}
        more = await score(agent, attrs.evolve(request, extra_info=extra, prompt_str="What is it?"))
        _assert_same(plain, more, "without further fields", "with them")


@check("REW-024", page=_PAGE + "concurrency", using=opened)
async def answers_belong_to_their_requests(subject: Subject, agent: RewardAgent) -> None:
    """A cancelled or failed call never gives its answer to another sample."""
    asked = examples(subject)
    alone = [await score(agent, request) for request in asked]
    for index, request in enumerate(asked):
        other = asked[(index + 1) % len(asked)]
        for turns in _TURNS:
            await _cancelled(agent, attrs.evolve(other, idempotency_key=f"cancelled/{index}/{turns}"), turns)
        for broken in requests_of(subject, "failing"):
            await score(agent, broken)
        found = await score(agent, attrs.evolve(request, idempotency_key=f"own/{index}"))
        _assert_same(alone[index], found, "alone", "after calls that ended otherwise")


@check("REW-025", since="1.1", page=_PAGE + "requests", using=opened)
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
        assert plain.status == found.status, f"without: {_text(plain)}; with it: {_text(found)}"


@check("REW-026", since="1.1", page=_PAGE + "caching")
async def the_version_is_that_of_the_scores(subject: Subject) -> None:
    """Two agents with the same settings have one version, a text, or none; it does not change while they score."""
    async with opened(subject) as agent, opened(subject) as other:
        first = agent.version
        assert first is None or (isinstance(first, str) and first), f"the version is {first!r}, expected a text or None"
        await score(agent, examples(subject)[0])
        assert first == agent.version, f"before a score {first!r}, after it {agent.version!r}"
        assert first == other.version, f"one agent has the version {first!r}, another one {other.version!r}"


@check("REW-027", since="1.1", page=_PAGE + "groups", using=opened)
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
        _assert_same(await score(agent, request), result, "alone", "in its group")


@check("REW-030", capability="post_process", page=_PAGE + "groups", using=opened)
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
        expected = [_text(result) for result in reversed(found)]
        turned = [_text(result) for result in backwards]
        assert expected == turned, f"a group in reverse: expected {expected}, found {turned}"


@check("REW-031", capability="post_process", page=_PAGE + "groups")
async def groups_do_not_mix(subject: Subject) -> None:
    """Post-processing a group depends on this group alone."""
    async with opened(subject) as agent:
        forwards = [[_text(each) for each in agent.post_process_scores(tuple(group))] for group in _groups()]
    async with opened(subject) as agent:
        backwards = [[_text(each) for each in agent.post_process_scores(tuple(group))] for group in _groups()[::-1]]
    assert forwards == backwards[::-1], f"groups in order: {forwards}; in reverse order: {backwards[::-1]}"


@check("REW-032", capability="token_scores", page=_PAGE + "scores", using=opened)
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


@check("REW-033", since="1.1", capability="compares", page=_PAGE + "groups", using=opened)
async def comparisons_do_not_depend_on_the_order(subject: Subject, agent: RewardAgent) -> None:
    """A group in another order gets the same scores, each at the place of its request."""
    if not agent.compares:
        raise NotApplicable("these settings compare nothing")
    asked = [attrs.evolve(each, idempotency_key=f"group/{n}") for n, each in enumerate(examples(subject))]
    forwards, backwards = list(await agent.score_group(asked)), list(await agent.score_group(asked[::-1]))
    for request, one, other in zip(asked, forwards, reversed(backwards), strict=True):
        same = one.status == other.status and math.isclose(one.score or 0.0, other.score or 0.0, rel_tol=1e-6)
        assert same, f"{request.solution_str[:40]!r}: {_text(one)}; with the group in reverse: {_text(other)}"


@check("REW-034", since="1.1", capability="turns", page=_PAGE + "concurrency")
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
        await _cancelled(agent, asked[0], 5)
        assert not free.locked(), "a turn was not given back"


@check("REW-035", since="1.1", capability="keeps_deadlines", page=_PAGE + "deadlines", using=opened)
async def it_ends_a_call_itself(subject: Subject, agent: RewardAgent) -> None:
    """An agent that keeps deadlines answers ``timeout`` soon after one."""
    for request in requests_of(subject, "slow", needed=True):
        asked = attrs.evolve(request, deadline_seconds=_SLOW_DEADLINE)
        waiting = asyncio.ensure_future(agent.compute_score(asked))
        done, _ = await asyncio.wait([waiting], timeout=_SLOW_DEADLINE + _GRACE)
        waiting.cancel()
        assert done, f"no answer {_GRACE} s after the deadline of {_SLOW_DEADLINE} s"
        assert waiting.result().status == "timeout", f"the answer is {_text(waiting.result())}"


@check("REW-050", tier="stress", page=_PAGE + "concurrency", deadline_seconds=120.0, using=opened)
async def hundreds_with_cancellations(subject: Subject, agent: RewardAgent) -> None:
    """If some of hundreds of concurrent samples are cancelled, each of the others gets its score."""
    asked = examples(subject)
    alone = [await score(agent, request) for request in asked]
    tasks = [
        asyncio.create_task(score(agent, attrs.evolve(asked[n % len(asked)], idempotency_key=f"many/{n}")))
        for n in range(400)
    ]
    await asyncio.sleep(0)
    for task in tasks[::7]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for number, result in enumerate(results):
        if isinstance(result, BaseException):
            assert number % 7 == 0, f"sample {number} was not cancelled, and raised {result!r}"
            continue
        _assert_same(alone[number % len(asked)], result, f"sample {number} alone", "among 400")


async def _cancelled(agent: RewardAgent, request: ScoreRequest, turns: int) -> None:
    """Start a call, cancel it after some turns of the event loop, and require that it ends."""
    call = asyncio.create_task(agent.compute_score(request))
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancelled(call, _GRACE, f"the call for {request.idempotency_key}")


def _groups() -> list[list[ScoreResult]]:
    def ok(number: float) -> ScoreResult:
        return ScoreResult(score=number)

    lost = ScoreResult(status="failed", error="no answer")
    late = ScoreResult(status="timeout", error="too late")
    return [[ok(0.0), ok(3.0), ok(1.0), ok(2.0)], [ok(5.0), lost, ok(7.0), late], [lost, late], [ok(1.0)], []]


def _assert_same(one: ScoreResult, other: ScoreResult, when: str, later: str) -> None:
    """Compare two results, without metrics and errors, which may have durations and ids."""
    same = (one.status, one.score, one.token_scores) == (other.status, other.score, other.token_scores)
    assert same, f"{when}: {_text(one)}; {later}: {_text(other)}"


def _text(result: ScoreResult) -> str:
    if result.status == "ok":
        return f"score {result.score!r}" + (f" {result.token_scores}" if result.token_scores else "")
    return f"{result.status} ({(result.error or '').splitlines()[0] if result.error else 'no reason'})"
