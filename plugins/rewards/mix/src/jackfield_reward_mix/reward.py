"""A reward that mixes dimensions of other rewards, as a plugin."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any, TypeVar

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import DeadlineExceeded, JackfieldError, RewardError
from jackfield_reward_mix.combining import clipped, combined, normalised
from jackfield_reward_mix.settings import Config

_T = TypeVar("_T")

_UNAVAILABLE = ("reward.http", "reward.unavailable", "rpc.lost")  #: errors of a service, not of a sample
_FORMAT = 1  #: of scores: another number is another version


class MixReward(RewardAgent):
    """A reward whose score combines named dimensions of other rewards, its parts.

    Parts score a sample concurrently. A part's failure is the sample's, unless the part may be skipped: then the
    weights of the others grow, and the metric ``skipped.PART`` is 1. Dimensions of the result are the parts' values
    before they are clipped and normalised; other numbers of the parts are metrics ``PART.NAME``.
    """

    def __init__(self, config: Config, context: RewardContext) -> None:
        super().__init__(config, context)
        self._made: dict[str, RewardAgent] | None = None
        self._room: dict[str, AbstractAsyncContextManager[None]] = {}  #: by part: for how many samples there is room

    @property
    def _parts(self) -> dict[str, RewardAgent]:
        if self._made is None:
            config: Config = self.config
            settings = {name: dict(part) for name, part in config.by_name.items()}
            self._made = {name: self.context.agent(part.pop("name"), part) for name, part in settings.items()}
            room = {name: part.concurrency for name, part in self._made.items()}
            self._room = {
                name: nullcontext() if most is None else asyncio.Semaphore(most) for name, most in room.items()
            }
        return self._made

    @property
    def version(self) -> str | None:
        """Return a digest of the parts' versions; None if a part has none, or a weight depends on the batch."""
        versions = {name: part.version for name, part in self._parts.items()}
        if self.config.is_scheduled or None in versions.values():
            return None
        return hashlib.sha256(json.dumps([_FORMAT, versions], sort_keys=True).encode()).hexdigest()[:16]

    @property
    def keeps_deadlines(self) -> bool:
        """Return whether each part gets its deadline here, from when it has room for the sample.

        A part whose deadline stands still while it waits for a turn is left to the host, unless it keeps it itself.
        """
        return not any(part.takes_turns and not part.keeps_deadlines for part in self._parts.values())

    @property
    def takes_turns(self) -> bool:
        """Return whether a part does; the others need none then."""
        return any(part.takes_turns for part in self._parts.values())

    @property
    def compares(self) -> bool:
        """Return whether a part compares the samples of a group."""
        return any(part.compares for part in self._parts.values())

    @property
    def generates(self) -> bool:
        """Return whether a part generates with the run's replicas."""
        return any(part.generates for part in self._parts.values())

    async def start(self) -> None:
        """Start all parts."""
        await asyncio.gather(*(part.start() for part in self._parts.values()))

    async def close(self) -> None:
        """Close all parts."""
        await asyncio.gather(*(part.close() for part in (self._made or {}).values()))

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample by all parts; without the normalisation, which needs its group."""
        results = await asyncio.gather(*(self._scored(name, request) for name in self._parts))
        return self._assembled(request, dict(zip(self._parts, results, strict=True)))

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score a group by all parts, each in its own way, and normalise."""
        columns = await asyncio.gather(*(self._column(name, requests) for name in self._parts))
        rows = [dict(zip(self._parts, row, strict=True)) for row in zip(*columns, strict=True)]
        scores = [self._assembled(request, row) for request, row in zip(requests, rows, strict=True)]
        return self._normalised(requests, scores)

    async def _column(self, name: str, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Return a part's scores of a group."""
        part = self._parts[name]
        if not part.compares:
            found = await asyncio.gather(*(self._scored(name, request) for request in requests))
            work: Awaitable[Sequence[ScoreResult]] = part.finish_group(requests, found)
        else:
            seconds = max((request.deadline_seconds for request in requests), default=0.0)
            work = self._within(name, part.score_group(requests), seconds)
        try:
            scores = await work
        except Exception as error:
            return [_raised(error)] * len(requests)
        if len(scores) != len(requests):
            failed = ScoreResult(status="failed", error=f"{len(scores)} scores for {len(requests)} samples")
            return [failed] * len(requests)
        return scores

    async def _scored(self, name: str, request: ScoreRequest) -> ScoreResult:
        try:
            work = self._parts[name].compute_score(request)
            return await self._within(name, work, request.deadline_seconds)
        except Exception as error:
            return _raised(error)

    async def _within(self, name: str, work: Coroutine[Any, Any, _T], seconds: float) -> _T:
        """Wait until a part has room, and then for its work, within a deadline."""
        part = self._parts[name]
        try:
            async with self._room[name]:
                if part.keeps_deadlines or part.takes_turns:
                    return await work
                return await self.context.clock.wait_for(work, seconds, f"the part {name} of the mixture")
        finally:
            work.close()  # if it did not begin

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Let the parts adjust their scores of a group, and normalise."""
        finishing = {name: part for name, part in self._parts.items() if _finishes(part)}
        if finishing:
            columns = {name: [_part_of(score, name) for score in scores] for name in self._parts}
            for name, part in finishing.items():
                columns[name] = list(await part.finish_group(requests, columns[name]))
            rows = [{name: columns[name][n] for name in columns} for n in range(len(scores))]
            scores = [
                self._assembled(request, row, score) if score.status == "ok" else score
                for request, row, score in zip(requests, rows, scores, strict=True)
            ]
        return self._normalised(requests, scores)

    def _normalised(self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]) -> list[ScoreResult]:
        config: Config = self.config
        found = list(scores)
        usable = [n for n, score in enumerate(scores) if score.status == "ok"]
        if config.normalise:
            group = normalised(config, [clipped(config, scores[n].dimensions) for n in usable])
            for n, values in zip(usable, group, strict=True):
                found[n] = self._scored_as(requests[n], scores[n], values)
        return found

    def _scored_as(self, request: ScoreRequest, result: ScoreResult, values: Mapping[str, float]) -> ScoreResult:
        """Return a result with the score of these values."""
        try:
            score = combined(self.config, values, result.dimensions, request.priority)
        except RewardError as error:
            return ScoreResult(status="failed", error=str(error))
        return attrs.evolve(result, score=score)

    def _assembled(
        self, request: ScoreRequest, parts: Mapping[str, ScoreResult], before: ScoreResult | None = None
    ) -> ScoreResult:
        """Return the result of a sample from those of its parts; ``before`` has its explanation and cost."""
        config: Config = self.config
        failed = {name: part for name, part in parts.items() if part.status != "ok"}
        earlier = {} if before is None else before.metrics
        skipped = {
            name for name in failed.keys() & set(config.skip)
            if earlier.get(f"skipped.{name}") or self._is_skipped(request, failed[name])
        }  # fmt: skip
        if hard := {name: part for name, part in failed.items() if name not in skipped}:
            return _failure(hard, parts)
        values = {f"{name}.{key}": value for name, part in parts.items() for key, value in _numbers(part).items()}
        values |= {name: float(part.score or 0.0) for name, part in parts.items() if part.status == "ok"}
        wanted = [name for name in config.weights if name.partition(".")[0] not in skipped]
        if missing := [name for name in wanted if name not in values]:
            fix = "name one that the part reports: " + (", ".join(sorted(values)) or "none")
            refusal = RewardError(
                "a part of the mixture has no such dimension", code="reward.mix", where=", ".join(missing), fix=fix
            )
            return ScoreResult(status="failed", error=str(refusal), is_final=True)
        dimensions = {name: values.pop(name) for name in wanted}
        metrics = values | {f"skipped.{name}": float(name in skipped) for name in config.skip}
        if config.is_scheduled:
            metrics |= {f"weight.{name}": one for name, one in config.weights_at(request.priority).items()}
        result = _joined(parts) if before is None else before
        result = attrs.evolve(result, dimensions=dimensions, metrics=metrics)
        return self._scored_as(request, result, clipped(config, dimensions))

    def _is_skipped(self, request: ScoreRequest, part: ScoreResult) -> bool:
        return part.is_final or request.retry >= self.config.skip_after


def _finishes(part: RewardAgent) -> bool:
    kind = type(part)
    return kind.finish_group is not RewardAgent.finish_group or (
        kind.post_process_scores is not RewardAgent.post_process_scores
    )


def _part_of(result: ScoreResult, name: str) -> ScoreResult:
    """Return a part's result from the numbers of the mixture's."""
    values = {**result.metrics, **result.dimensions}
    if result.status != "ok" or name not in values:
        return ScoreResult(status="failed", error=result.error or f"the part {name} failed")
    own = {key.removeprefix(f"{name}."): one for key, one in values.items() if key.startswith(f"{name}.")}
    return ScoreResult(score=values[name], dimensions=own, metrics=own)


def _raised(error: Exception) -> ScoreResult:
    is_late = isinstance(error, TimeoutError | DeadlineExceeded)
    text = str(error) if isinstance(error, JackfieldError) else f"{type(error).__name__}: {error}"
    is_unavailable = isinstance(error, JackfieldError) and error.code in _UNAVAILABLE
    return ScoreResult(status="timeout" if is_late else "failed", error=text, is_unavailable=is_unavailable)


def _numbers(part: ScoreResult) -> dict[str, float]:
    return {**part.metrics, **part.dimensions}


def _failure(failed: Mapping[str, ScoreResult], parts: Mapping[str, ScoreResult]) -> ScoreResult:
    waits = [part.retry_after for part in failed.values() if part.retry_after is not None]
    return attrs.evolve(
        _joined(parts),
        status="timeout" if all(part.status == "timeout" for part in failed.values()) else "failed",
        score=None,
        error="; ".join(f"the part {name}: {part.error}" for name, part in failed.items()),
        is_final=any(part.is_final for part in failed.values()),
        is_unavailable=any(part.is_unavailable for part in failed.values()),
        retry_after=max(waits, default=None),
    )


def _joined(parts: Mapping[str, ScoreResult]) -> ScoreResult:
    """Return the explanations, raw answers and costs of parts in one result."""

    def texts(key: str) -> str | None:
        found = {name: getattr(part, key) for name, part in parts.items()}
        return "\n".join(f"{name}: {text}" for name, text in found.items() if text is not None) or None

    costs: dict[str, Any] = {key: sum(getattr(part, key) for part in parts.values()) for key in ("tokens", "seconds")}
    return ScoreResult(score=0.0, explanation=texts("explanation"), raw=texts("raw"), **costs)
