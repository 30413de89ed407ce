"""Helpers for the suite of reward agents: requests, calls with a deadline, and requirements of results."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.compose.rewards import http_client
from jackfield.plugins import installed
from jackfield_conformance.registry import NotApplicable, Subject
from jackfield_conformance.support.expecting import cancelled, finite

PAGE = "docs/plugins/reward.md#"
DEADLINE = 20.0  #: seconds for one score of an example
GRACE = 5.0  #: seconds until a cancelled call, or the processes of a closed agent, have ended
SLOW_DEADLINE = 0.5  #: seconds, of a slow request

_EXAMPLES: tuple[Mapping[str, Any], ...] = (
    {"solution_str": "Two and two make four.\n#### 4", "ground_truth": "#### 4"},
    {"solution_str": "It is three.\n#### 3", "ground_truth": "#### 4"},
)
_FIELDS = {field.name for field in attrs.fields(ScoreRequest)}


class Injected(Exception):
    """Raised by a request that a check has made unreadable."""


class Unreadable(ScoreRequest):
    """A request whose texts raise when they are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("solution_str", "ground_truth"):
            object.__setattr__(self, "_was_read", True)
            raise Injected(f"{name} cannot be read: raised by the conformance suite")
        return super().__getattribute__(name)

    @property
    def was_read(self) -> bool:
        """Return whether the plugin has read a text."""
        return bool(self.__dict__.get("_was_read", False))


def requests_of(subject: Subject, key: str, needed: bool = False) -> list[ScoreRequest]:
    """Return the fixture's requests under ``key``; raise ``NotApplicable`` if there are none and they are needed."""
    given: Sequence[Mapping[str, Any]] = subject.fixture.get(key) or (_EXAMPLES if key == "examples" else ())
    if needed and not given:
        raise NotApplicable(f"the fixture has no '{key}'")
    unknown = sorted({name for fields in given for name in fields} - _FIELDS - {"score"})
    assert not unknown, f"the fixture has fields that a ScoreRequest does not have: {unknown}"
    made = []
    for number, fields in enumerate(given):
        options: dict[str, Any] = {"data_source": "conformance", "deadline_seconds": DEADLINE, **fields}
        options.pop("score", None)
        made.append(ScoreRequest(**{"idempotency_key": f"{key}/{number}", **options}))
    return made


def examples(subject: Subject) -> list[ScoreRequest]:
    """Return the fixture's ``examples``, or a right and a wrong answer of a sum."""
    return requests_of(subject, "examples")


def expected_scores(subject: Subject) -> list[float | None]:
    """Return the scores of the examples; None for an example without one."""
    return [fields.get("score") for fields in subject.fixture.get("examples") or _EXAMPLES]


@contextlib.asynccontextmanager
async def context_of(subject: Subject, **services: Any) -> AsyncIterator[RewardContext]:
    """Make a context as a run does: with an HTTP client, the installed rewards, and what the fixture's ``context`` has.

    ``services`` replace these.
    """
    http = http_client()

    def agent(name: str, settings: Mapping[str, Any]) -> RewardAgent:
        made: RewardAgent = installed().load("reward", name).build(settings, context, "reward")
        return made

    given: dict[str, Any] = {"agent": agent, "cache": subject.folder, **({} if http is None else {"http": http})}
    given |= subject.fixture.get("context") or {}
    context = RewardContext(**{**given, **services})
    try:
        yield context
    finally:
        if http is not None:
            await http.close()


@contextlib.asynccontextmanager
async def opened(
    subject: Subject, settings: Mapping[str, Any] | None = None, **services: Any
) -> AsyncIterator[RewardAgent]:
    """Start an agent with other ``settings`` in a context with other ``services``, and close it at the end."""
    async with context_of(subject, **services) as context:
        agent: RewardAgent = subject.make(context, **(settings or {}))
        try:
            await agent.start()
            yield agent
        finally:
            await agent.close()


async def score(agent: RewardAgent, request: ScoreRequest) -> ScoreResult:
    """Score a request as the run does: under its deadline, and an error becomes a status."""
    seconds = request.deadline_seconds
    try:
        return await Clock().wait_for(agent.compute_score(request), seconds, f"the score of {request.idempotency_key}")
    except TimeoutError as error:
        return ScoreResult(status="timeout", error=str(error) or "TimeoutError")
    except Exception as error:
        status = "timeout" if type(error).__name__ == "DeadlineExceeded" else "failed"
        return ScoreResult(status=status, error=f"{type(error).__name__}: {error}")  # type: ignore[arg-type]


async def scores(agent: RewardAgent, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
    """Score requests concurrently."""
    return list(await asyncio.gather(*(score(agent, request) for request in requests)))


def assert_result(result: object, request: ScoreRequest | None = None, what: str = "") -> None:
    """Require a score or a reason, never both, and only finite numbers."""
    what = what or (f"the result for {request.idempotency_key}" if request else "the result")
    assert isinstance(result, ScoreResult), f"{what} is {type(result).__name__}, expected a ScoreResult"
    statuses = ("ok", "failed", "timeout")
    assert result.status in statuses, f"{what} has the status {result.status!r}, expected one of {statuses}"
    if result.status == "ok":
        assert finite(result.score), f"{what} is ok with the score {result.score!r}, expected a finite number"
    else:
        assert result.score is None, f"{what} is {result.status} with the score {result.score!r}, expected None"
        assert result.error, f"{what} is {result.status} without an error text"
    for token_score in result.token_scores or ():
        assert finite(token_score), f"{what} has the token score {token_score!r}, expected finite numbers"
    if request is not None and result.token_scores is not None and request.response_ids:
        expected, found = len(request.response_ids), len(result.token_scores)
        assert expected == found, f"{what} has {found} token scores for {expected} response tokens"
    for name, value in [*result.metrics.items(), *result.dimensions.items()]:
        assert isinstance(name, str), f"{what} has a metric named {name!r}, expected a text"
        assert finite(value), f"{what} has the metric {name} = {value!r}, expected a finite number"
    for name in ("explanation", "raw"):
        text = getattr(result, name)
        assert text is None or isinstance(text, str), f"{what} has the {name} {text!r}, expected a text"
    for name in ("tokens", "seconds"):
        cost = getattr(result, name)
        assert finite(cost), f"{what} costs {name} {cost!r}, expected a number"
        assert cost >= 0, f"{what} costs {name} {cost!r}, expected a number that is not negative"


async def cancel_after(agent: RewardAgent, request: ScoreRequest, turns: int) -> None:
    """Start a call, cancel it after some turns of the event loop, and require that it ends."""
    call = asyncio.create_task(agent.compute_score(request))
    for _ in range(turns):
        await asyncio.sleep(0)
    await cancelled(call, GRACE, f"the call for {request.idempotency_key}")


def assert_same(one: ScoreResult, other: ScoreResult, when: str, later: str) -> None:
    """Compare two results, without metrics and errors, which may have durations and ids.

    Scores may differ by what a batch of another size changes in the last digits of a model's output.
    """
    pairs = zip(_numbers(one), _numbers(other), strict=False)
    close = all(math.isclose(left, right, rel_tol=1e-6, abs_tol=1e-9) for left, right in pairs)
    same = (one.status, len(_numbers(one))) == (other.status, len(_numbers(other))) and close
    assert same, f"{when}: {text_of(one)}; {later}: {text_of(other)}"


def _numbers(result: ScoreResult) -> list[float]:
    own = () if result.score is None else (result.score,)
    return [*own, *(result.token_scores or ())]


def text_of(result: ScoreResult) -> str:
    """Describe a result in one line."""
    if result.status == "ok":
        return f"score {result.score!r}" + (f" {result.token_scores}" if result.token_scores else "")
    return f"{result.status} ({(result.error or '').splitlines()[0] if result.error else 'no reason'})"
