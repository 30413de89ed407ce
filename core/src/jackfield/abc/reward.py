"""Contract of a reward agent, which scores samples by rule, by model or by a service."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Any, ClassVar, Literal, NoReturn, Protocol

import attrs

from jackfield.clock import Clock
from jackfield.errors import RewardError


@attrs.frozen(kw_only=True)
class HttpAnswer:
    """An answer to an HTTP request."""

    status: int
    text: str  #: the whole body
    retry_after: float | None = None  #: seconds of the header Retry-After


class HttpClient(Protocol):
    """An HTTP client that keeps connections open and has no limit on how many."""

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        limit: int = 16 * 2**20,
    ) -> HttpAnswer:
        """Send ``body`` as JSON and return the answer, whatever its status is.

        An answer that does not come, breaks off or is longer than ``limit`` bytes raises ``reward.http``. Cancelling
        the call ends the request.
        """


@attrs.frozen(kw_only=True)
class GeneratedText:
    """An answer of a model."""

    text: str
    tokens: int  #: of prompt and answer together


class Generate(Protocol):
    """Generates with a model that the host serves."""

    async def __call__(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Answer a conversation with the model ``policy`` (a replica of this run), or another one that the host has.

        ``sampling`` are keyword arguments of :class:`jackfield.abc.rollout.SamplingParams`. A model that the host does
        not have raises ``reward.context``.
        """


def absent(what: str) -> Callable[..., NoReturn]:
    """Return a function that refuses a service that this host does not give."""

    def refuse(*_: Any, **__: Any) -> NoReturn:
        fix = "give it to RewardContext, as a run does"
        raise RewardError(f"the reward's host has no {what}", code="reward.context", expected=what, fix=fix)

    return refuse


class _NoHttp:
    request = staticmethod(absent("HTTP client"))


def read_secret(name: str) -> str:
    """Return an environment variable, such as an API key; raise ``reward.secret`` if it is missing or empty."""
    if value := os.environ.get(name):
        return value
    fix = f"export {name}=… where the worker runs"
    raise RewardError("a secret is missing", code="reward.secret", where=name, fix=fix)


@attrs.frozen(kw_only=True, eq=False)
class RewardContext:
    """The context that a reward agent gets at its construction."""

    clock: Clock = attrs.field(factory=Clock)
    seed: int = 0
    heartbeat_seconds: float = 30.0  #: a process of the agent without a heartbeat for so long is dead
    #: path prefix of files that get the output of the agent's processes (``UserCodePool``); None: no files
    logs: str | None = None
    # Since 1.1:
    run: str = ""  #: name that no other run has, to tell apart equal keys of several runs
    http: HttpClient = attrs.field(factory=_NoHttp)
    generate: Generate = attrs.field(factory=lambda: absent("served model"))
    cache: Path | None = None  #: a folder that is kept across runs; None: there is none
    #: adds a number to the run's metric ``reward/NAME``, of which each step reports the sum
    count: Callable[[str, float], None] = lambda name, number: None
    #: waits for a turn within the limits of the service, for an agent with ``takes_turns``. The deadline of the call
    #: stands still meanwhile. Tokens, an estimate or what was used, count towards the limit per minute
    turn: Callable[[], AbstractAsyncContextManager[Callable[[int], None]]] = lambda: nullcontext(lambda tokens: None)
    #: a sample of the first task, with the task's own answer: what cannot score it can be refused at the start
    example: ScoreRequest | None = None
    #: makes another reward agent by name and settings, for the agent to start, call and close
    agent: Callable[[str, Mapping[str, Any]], RewardAgent] = attrs.field(factory=lambda: absent("other rewards"))

    def secret(self, name: str) -> str:
        """Return an environment variable, such as an API key; raise ``reward.secret`` if it is missing or empty."""
        return read_secret(name)


@attrs.frozen(kw_only=True)
class ResponsePart:
    """A part of a response that the model or its environment wrote."""

    author: Literal["model", "tool"]
    text: str


@attrs.frozen(kw_only=True)
class ScoreRequest:
    """One sample to score."""

    data_source: str
    solution_str: str  #: text of the response
    ground_truth: str
    extra_info: Mapping[str, Any] = attrs.field(factory=dict)  #: other fields of the task
    prompt_str: str = ""
    response_ids: tuple[int, ...] = ()
    idempotency_key: str = ""  #: the same for every retry of this sample
    retry: int = 0  #: 0 is the first call
    deadline_seconds: float = 60.0  #: the call is cancelled after so long
    # Since 1.1:
    group_id: str = ""  #: the same for the rollouts that are compared with each other; empty: none are
    group_size: int = 1  #: number of these rollouts
    messages: tuple[Mapping[str, Any], ...] = ()  #: the prompt as a conversation
    parts: tuple[ResponsePart, ...] = ()  #: the response, what the model and what tools wrote apart
    response_mask: tuple[int, ...] = ()  #: 1 on the model's own tokens, one per response token
    turns: int = 1  #: the model's turns
    metrics: Mapping[str, float] = attrs.field(factory=dict)  #: of the agent loop
    tool_calls: tuple[Mapping[str, Any], ...] = ()  #: the model's, in the agent's form
    images: tuple[Any, ...] = ()  #: of the prompt's messages, in their form
    priority: int = 0  #: a lower number is scored first: the batch

    @property
    def model_text(self) -> str:
        """Return the model's own text, without the output of tools."""
        return "".join(part.text for part in self.parts if part.author == "model") if self.parts else self.solution_str

    @property
    def tool_text(self) -> str:
        """Return the output of tools."""
        return "".join(part.text for part in self.parts if part.author == "tool")


@attrs.frozen(kw_only=True)
class ScoreResult:
    """A score, or the reason why there is none. A failure is never a score of 0."""

    status: Literal["ok", "failed", "timeout"] = "ok"
    score: float | None = None  #: set exactly when ``status`` is ``ok``
    token_scores: tuple[float, ...] | None = None  #: one per response token, instead of one score at the end
    metrics: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None
    # Since 1.1:
    explanation: str | None = None  #: why it has this score
    dimensions: Mapping[str, float] = attrs.field(factory=dict)  #: named parts of the score, reported like metrics
    raw: str | None = None  #: the judge's answer as it came
    tokens: int = 0  #: cost: tokens that were read and generated for it
    seconds: float = 0.0  #: cost: seconds of a paid service or a device
    is_final: bool = False  #: a failure that another try does not mend: the ground truth is broken
    is_unavailable: bool = False  #: a failure of the service that scores, not of this sample; breakers count these
    retry_after: float | None = None  #: seconds that a service asked to wait before another try
    is_cached: bool = False  #: set by the host: the score was known from an earlier request


class RewardAgent(ABC):
    """A scorer of samples, which handles many calls concurrently.

    Invariants, each checked by the conformance suite: a deadline ends the call and whatever it started; a retry
    carries the same idempotency key; a failure is a status, never a score of 0; group post-processing sees whole
    groups.
    """

    abi_version: ClassVar[str] = "1.1"

    def __init__(self, config: Any, context: RewardContext) -> None:
        self.config = config
        self.context = context

    @abstractmethod
    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample. An exception becomes ``status="failed"`` with the exception's text."""

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        """Adjust the scores of one whole group, in rollout order (fill in failed scores, rank, …)."""
        return scores

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Adjust the scores of one whole group like :meth:`post_process_scores`, which is the default (since 1.1)."""
        return self.post_process_scores(scores)

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score one whole group, in rollout order (since 1.1): rankings, comparisons of pairs, diversity.

        By default, this is ``compute_score`` of each and ``finish_group``. If it is overridden, a run calls nothing
        else for groups: no sample is scored before its siblings have ended. An error fails the group.
        """
        scores = await asyncio.gather(*map(self.compute_score, requests))
        return await self.finish_group(requests, scores)

    @property
    def compares(self) -> bool:
        """Return whether groups are scored by :meth:`score_group` alone (since 1.1)."""
        return type(self).score_group is not RewardAgent.score_group

    @property
    def version(self) -> str | None:
        """Return what scores depend on beside requests and settings, such as a digest of code (since 1.1).

        Scores are cached only with a version, and found again only under the same one.
        """
        return None

    @property
    def takes_turns(self) -> bool:
        """Return whether the agent takes ``context.turn`` for each of its requests (since 1.1).

        Otherwise the service takes one for each score.
        """
        return False

    @property
    def generates(self) -> bool:
        """Return whether the agent calls ``context.generate`` with ``policy`` (since 1.1).

        The run then scores only while its replicas have the devices.
        """
        return False

    @property
    def keeps_deadlines(self) -> bool:
        """Return whether the agent itself ends a call after ``deadline_seconds`` of execution (since 1.1).

        Time in a queue of another process does not count. The host then has no deadline of its own.
        """
        return False

    @property
    def concurrency(self) -> int | None:
        """The maximum number of samples that are scored at a time; None: no limit.

        The deadline of a sample starts when its scoring starts, not while it waits.
        """
        return None

    async def start(self) -> None:
        """Open connections and workers, before the first score."""
        return

    async def close(self) -> None:
        """End everything the agent started."""
        return
