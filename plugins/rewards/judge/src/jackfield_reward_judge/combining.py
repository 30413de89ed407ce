"""Makes one result of several verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs

from jackfield.abc.reward import ScoreResult
from jackfield.errors import DeadlineExceeded
from jackfield_reward_judge.asking import Verdict
from jackfield_reward_judge.settings import JudgeRewardConfig
from jackfield_reward_requests import failed


@attrs.frozen
class Vote:
    """The verdict of one judge, with its name and, if it has one, its score."""

    judge: str
    verdict: Verdict
    score: float | None


def combine(values: Sequence[float], config: JudgeRewardConfig) -> float:
    """Return one score of several."""
    if config.combine == "majority":
        threshold = 0.5 if config.threshold is None else config.threshold
        return _sign(sum(1 if value >= threshold else -1 for value in values))
    if config.combine == "minimum":
        return min(values)
    return statistics.median(values) if config.combine == "median" else statistics.fmean(values)


def combine_outcomes(outcomes: Sequence[float], config: JudgeRewardConfig) -> float:
    """Return one outcome of a pair of several: 1 if the first response wins, 0.5 a tie, 0 if it loses."""
    if config.combine == "majority":
        return _sign(sum(outcomes) - len(outcomes) / 2)
    return statistics.median(outcomes) if config.combine == "median" else statistics.fmean(outcomes)


def result_of(votes: Sequence[Vote], config: JudgeRewardConfig) -> ScoreResult:
    """Return the score that the votes give, or a failure if the quorum is not reached."""
    tokens = sum(vote.verdict.tokens for vote in votes)
    seconds = sum(vote.verdict.seconds for vote in votes)
    good = [vote for vote in votes if vote.score is not None]
    raw = joined({vote.judge: vote.verdict.raw for vote in votes})
    if len(good) < (needed := config.quorum or len(votes)):
        failing = failure([vote.verdict for vote in votes], needed)
        return attrs.evolve(failing, tokens=tokens, seconds=seconds, raw=raw)
    scores = [vote.score for vote in good if vote.score is not None]
    metrics = {"repaired": sum(vote.verdict.repaired for vote in votes) / len(votes)}
    if len(votes) > 1:
        metrics |= {"spread": max(scores) - min(scores), "failed_verdicts": float(len(votes) - len(good))}
    judgements = {vote.judge: vote.verdict.judgement for vote in good}
    return ScoreResult(
        score=combine(scores, config),
        metrics=metrics,
        dimensions=_dimensions(good, config),
        explanation=joined({name: each.explanation for name, each in judgements.items() if each is not None}),
        raw=raw,
        tokens=tokens,
        seconds=seconds,
    )


def failure(verdicts: Sequence[Verdict], needed: int) -> ScoreResult:
    """Return the failure of fewer verdicts than needed. It is final if another try cannot give enough."""
    errors = [verdict.error for verdict in verdicts if verdict.error is not None]
    results = [failed(error) for error in errors]
    waits = [result.retry_after for result in results if result.retry_after is not None]
    first = next((error for error in errors if not isinstance(error, DeadlineExceeded)), errors[0])
    shown = (
        str(first) if len(verdicts) == 1 else f"{len(errors)} of {len(verdicts)} verdicts failed; one of them: {first}"
    )
    return attrs.evolve(
        failed(first),
        error=shown,
        is_final=len(verdicts) - sum(result.is_final for result in results) < needed,
        retry_after=max(waits) if waits else None,
    )


def joined(texts: Mapping[str, str | None]) -> str | None:
    """Return the texts of several judges as one, each after its name; of one judge, its text."""
    given = {name: text for name, text in texts.items() if text}
    if len(texts) == 1:
        return next(iter(given.values()), None)
    return "\n\n".join(f"{name}: {text}" for name, text in given.items()) or None


def _dimensions(good: Sequence[Vote], config: JudgeRewardConfig) -> dict[str, float]:
    """Return each criterion's score, of the judges that have it."""
    found = dict[str, list[float]]()
    for vote in good:
        judgement = vote.verdict.judgement
        for name, score in judgement.scores.items() if judgement is not None else ():
            found.setdefault(name, []).append(score)
    found.pop("score", None)
    if config.combine == "majority":
        return {name: statistics.fmean(scores) for name, scores in found.items()}
    return {name: combine(scores, config) for name, scores in found.items()}


def _sign(number: float) -> float:
    return 0.5 if number == 0 else float(number > 0)
