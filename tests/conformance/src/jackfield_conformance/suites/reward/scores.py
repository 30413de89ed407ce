"""Checks of single scores: results, failures, retries, concurrency, deadlines and life."""

from __future__ import annotations

import asyncio
import copy
import math

import attrs

from jackfield.abc.reward import RewardAgent
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import reward as support
from jackfield_conformance.support.expecting import assert_no_tasks
from jackfield_conformance.support.processes import adopting, assert_nothing_left, descendants, names, remaining
from jackfield_conformance.support.reward import (
    PAGE,
    Unreadable,
    assert_result,
    assert_same,
    cancel_after,
    context_of,
    examples,
    expected_scores,
    opened,
    requests_of,
    score,
    scores,
)

#: Numbers of turns of the event loop before a call is cancelled.
_TURNS = (0, 1, 2, 5)

#: Unexpected answers.
_ODD_ANSWERS = ("", " \n\t", "#### ", "-" * 20_000, "四 \u200b\U0001f600 \u0000", "{'score': NaN} \\boxed{1}")


@check("REW-010", page=PAGE + "scores", using=opened)
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


@check("REW-011", page=PAGE + "scores", using=opened)
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


@check("REW-012", page=PAGE + "failures", using=opened)
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


@check("REW-013", page=PAGE + "retries", using=opened)
async def a_retry_gets_the_same_answer(subject: Subject, agent: RewardAgent) -> None:
    """A retry of a sample, with the same idempotency key, gets the first answer."""
    for request in examples(subject):
        first = await score(agent, request)
        again = await score(agent, attrs.evolve(request, retry=1))
        assert_same(first, again, "at first", "at the retry")


@check("REW-014", page=PAGE + "retries", using=opened)
async def a_retry_after_a_cancelled_attempt(subject: Subject, agent: RewardAgent) -> None:
    """A retry after a cancelled first call scores the sample as if there had been no first call."""
    request = examples(subject)[0]
    untouched = await score(agent, attrs.evolve(request, idempotency_key="untouched"))
    for turns in _TURNS:
        mine = attrs.evolve(request, idempotency_key=f"cancelled/{turns}")
        await cancel_after(agent, mine, turns)
        again = await score(agent, attrs.evolve(mine, retry=1))
        assert_same(untouched, again, "untouched", "after a cancelled attempt")


@check("REW-015", page=PAGE + "concurrency", using=opened)
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
            assert_same(alone[index], found, "alone", f"among {len(order)}")


@check("REW-016", page=PAGE + "deadlines", using=opened)
async def a_cancelled_call_ends(subject: Subject, agent: RewardAgent) -> None:
    """A cancelled call ends at once and leaves no task behind."""
    quick = examples(subject)[0]
    for request in [quick, *requests_of(subject, "slow")]:
        await score(agent, quick)
        before = asyncio.all_tasks()
        for turns in _TURNS:
            await cancel_after(agent, request, turns)
            assert_no_tasks(before, "after a cancelled call")


@check("REW-017", page=PAGE + "deadlines")
async def a_deadline_ends_what_was_started(subject: Subject) -> None:
    """A deadline ends a slow call and the processes that it started."""
    slow, others = requests_of(subject, "slow", needed=True), descendants()  # others may end at any moment
    with adopting():
        async with opened(subject) as agent:
            for request in slow:
                await score(agent, examples(subject)[0])
                before = descendants() - others
                result = await score(agent, attrs.evolve(request, deadline_seconds=support.SLOW_DEADLINE))
                assert_result(result, request)
                assert result.status != "ok", f"a slow request was scored within {support.SLOW_DEADLINE} s: is it slow?"
                left = await asyncio.to_thread(remaining, descendants() - before - others, support.GRACE)
                more = len(left) - len(before - descendants())  # a worker that was replaced is no leak
                assert more <= 0, f"processes that continue after the deadline: {names(left)}"


@check("REW-018", page=PAGE + "concurrency", using=opened)
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


@check("REW-019", page=PAGE + "life")
def close_leaves_nothing(subject: Subject) -> None:
    """After ``close`` an agent leaves no task, thread, process, socket, shared memory or file."""

    async def life(_: object) -> None:
        async with opened(subject) as agent:
            await scores(agent, examples(subject))
            await cancel_after(agent, examples(subject)[0], 2)

    assert_nothing_left(life, subject.folder / "lives")


@check("REW-020", page=PAGE + "life")
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
            assert_same(first, again, "before a second start", "after it")
            await agent.close()
        finally:
            await agent.close()


@check("REW-021", page=PAGE + "life", using=opened)
async def agents_share_nothing(subject: Subject, agent: RewardAgent) -> None:
    """Two agents in one process share nothing: closing one does not affect the other."""
    request = examples(subject)[0]
    first = await score(agent, request)
    async with opened(subject) as other:
        beside = await score(other, request)
        assert_same(first, beside, "one", "the other")
    after = await score(agent, attrs.evolve(request, idempotency_key="after"))
    assert_same(first, after, "before the other was closed", "after")


@check("REW-022", page=PAGE + "requests", using=opened)
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


@check("REW-023", page=PAGE + "requests", using=opened)
async def further_fields_are_tolerated(subject: Subject, agent: RewardAgent) -> None:
    """Fields of a task that the agent does not know change no score."""
    for request in examples(subject):
        plain = await score(agent, request)
        extra = {**request.extra_info, "conformance_unknown": ["field", 1, None]}
        more = await score(agent, attrs.evolve(request, extra_info=extra, prompt_str="What is it?"))
        assert_same(plain, more, "without further fields", "with them")


@check("REW-024", page=PAGE + "concurrency", using=opened)
async def answers_belong_to_their_requests(subject: Subject, agent: RewardAgent) -> None:
    """A cancelled or failed call never gives its answer to another sample."""
    asked = examples(subject)
    alone = [await score(agent, request) for request in asked]
    for index, request in enumerate(asked):
        other = asked[(index + 1) % len(asked)]
        for turns in _TURNS:
            await cancel_after(agent, attrs.evolve(other, idempotency_key=f"cancelled/{index}/{turns}"), turns)
        for broken in requests_of(subject, "failing"):
            await score(agent, broken)
        found = await score(agent, attrs.evolve(request, idempotency_key=f"own/{index}"))
        assert_same(alone[index], found, "alone", "after calls that ended otherwise")


@check("REW-050", tier="stress", page=PAGE + "concurrency", deadline_seconds=120.0, using=opened)
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
        assert_same(alone[number % len(asked)], result, f"sample {number} alone", "among 400")
