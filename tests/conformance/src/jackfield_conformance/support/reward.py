"""What the checks of reward agents share: requests, the host's way of asking, and what a result must look like."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield_conformance.registry import NotApplicable
from jackfield_conformance.subject import Subject
from jackfield_conformance.support.expecting import finite

#: Seconds for one score of an example.
DEADLINE = 20.0

_EXAMPLES: tuple[Mapping[str, Any], ...] = (
    {"solution_str": "Two and two make four.\n#### 4", "ground_truth": "#### 4"},
    {"solution_str": "It is three.\n#### 3", "ground_truth": "#### 4"},
)
_FIELDS = {field.name for field in attrs.fields(ScoreRequest)}


class Injected(Exception):
    """Raised out of a request that a check has made unreadable."""


class Unreadable(ScoreRequest):
    """A request whose texts raise when they are read."""

    def __getattribute__(self, name: str) -> Any:
        if name in ("solution_str", "ground_truth"):
            object.__setattr__(self, "_was_read", True)
            raise Injected(f"{name} cannot be read: raised by the conformance suite")
        return super().__getattribute__(name)

    @property
    def was_read(self) -> bool:
        """Return whether the plugin met the error."""
        return bool(self.__dict__.get("_was_read", False))


def requests_of(subject: Subject, key: str) -> list[ScoreRequest]:
    """The requests that the fixture gives under ``key``, each with a key of its own; ``NotApplicable`` for none."""
    given: Sequence[Mapping[str, Any]] = subject.fixture.get(key, ())
    if not given:
        raise NotApplicable(f"the fixture gives no '{key}'")
    return [_request(fields, f"{key}/{number}") for number, fields in enumerate(given)]


def examples(subject: Subject) -> list[ScoreRequest]:
    """The fixture's ``examples``, or a right and a wrong answer of a sum."""
    given: Sequence[Mapping[str, Any]] = subject.fixture.get("examples") or _EXAMPLES
    return [_request(fields, f"examples/{number}") for number, fields in enumerate(given)]


def expected_scores(subject: Subject) -> list[float | None]:
    """The scores that the fixture gives with its examples; None where it gives none."""
    given: Sequence[Mapping[str, Any]] = subject.fixture.get("examples") or _EXAMPLES
    return [fields.get("score") for fields in given]


def _request(fields: Mapping[str, Any], key: str) -> ScoreRequest:
    known = {name: value for name, value in fields.items() if name in _FIELDS}
    unknown = sorted(fields.keys() - _FIELDS - {"score"})
    assert not unknown, f"the fixture gives fields that a ScoreRequest does not have: {unknown}"
    options: dict[str, Any] = {"data_source": "conformance", "deadline_seconds": DEADLINE, "idempotency_key": key}
    return ScoreRequest(**{**options, **known})


@contextlib.asynccontextmanager
async def opened(subject: Subject) -> AsyncIterator[RewardAgent]:
    """A started agent, closed at the end."""
    agent: RewardAgent = subject.make(RewardContext())
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


async def score(agent: RewardAgent, request: ScoreRequest) -> ScoreResult:
    """Ask as the host does: under the request's deadline, and what is raised becomes a status."""
    seconds = request.deadline_seconds
    try:
        return await Clock().wait_for(agent.compute_score(request), seconds, f"the score of {request.idempotency_key}")
    except TimeoutError as error:
        return ScoreResult(status="timeout", error=str(error) or "TimeoutError")
    except Exception as error:
        status = "timeout" if type(error).__name__ == "DeadlineExceeded" else "failed"
        return ScoreResult(status=status, error=f"{type(error).__name__}: {error}")  # type: ignore[arg-type]


async def scores(agent: RewardAgent, requests: Sequence[ScoreRequest]) -> list[ScoreResult]:
    """All at once."""
    return list(await asyncio.gather(*(score(agent, request) for request in requests)))


def assert_result(result: object, request: ScoreRequest | None = None, what: str = "") -> None:
    """A score or a reason why there is none, never both, and every number finite."""
    what = what or (f"the result for {request.idempotency_key}" if request else "the result")
    assert isinstance(result, ScoreResult), f"{what} is {type(result).__name__}, expected a ScoreResult"
    statuses = ("ok", "failed", "timeout")
    assert result.status in statuses, f"{what} has the status {result.status!r}, expected one of {statuses}"
    if result.status == "ok":
        assert finite(result.score), f"{what} is ok with the score {result.score!r}, expected a finite number"
    else:
        assert result.score is None, f"{what} is {result.status} with the score {result.score!r}, expected None"
        assert result.error, f"{what} is {result.status} and its error says nothing"
    for token_score in result.token_scores or ():
        assert finite(token_score), f"{what} has the token score {token_score!r}, expected finite numbers"
    if request is not None and result.token_scores is not None and request.response_ids:
        expected, found = len(request.response_ids), len(result.token_scores)
        assert expected == found, f"{what} has {found} token scores for {expected} response tokens"
    for name, value in result.metrics.items():
        assert isinstance(name, str), f"{what} has a metric named {name!r}, expected a text"
        assert finite(value), f"{what} has the metric {name} = {value!r}, expected a finite number"
