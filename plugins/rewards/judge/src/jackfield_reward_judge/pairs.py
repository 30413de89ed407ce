"""Compares the responses of a group in pairs, each in both orders, because judges prefer a place."""

from __future__ import annotations

import itertools
import random
import statistics
from collections.abc import Sequence

import attrs

from jackfield.abc.reward import ScoreResult
from jackfield_reward_judge.asking import Verdict
from jackfield_reward_judge.combining import combine_outcomes, failure, joined
from jackfield_reward_judge.settings import JudgeRewardConfig, PairwiseConfig

Pair = tuple[int, int]


@attrs.frozen(kw_only=True)
class Comparison:
    """What one judge says of a pair: the verdict with the first response as A, and that with it as B."""

    pair: Pair
    forwards: Verdict
    backwards: Verdict

    @property
    def outcome(self) -> float | None:
        """1 if the first response wins, 0 if it loses, 0.5 a tie, which a change of the mind is, too; None: failed."""
        first, second = self.winners
        if first is None or second is None:
            return None
        return {("A", "B"): 1.0, ("B", "A"): 0.0}.get((first, second), 0.5)

    @property
    def winners(self) -> tuple[str | None, str | None]:
        """Return the winner of each order."""
        first, second = self.forwards.judgement, self.backwards.judgement
        return (None if first is None else first.winner, None if second is None else second.winner)

    @property
    def is_inconsistent(self) -> bool:
        """Return whether the order has changed the verdict."""
        return None not in self.winners and self.winners not in (("A", "B"), ("B", "A"), ("tie", "tie"))


def pairs_of(count: int, config: PairwiseConfig, seed: str) -> list[Pair]:
    """Return which of ``count`` responses are compared; each is in a pair, and the same seed gives the same pairs."""
    every = list(itertools.combinations(range(count), 2))
    if config.pairs == "all" or count < 3:
        return every
    if config.pairs == "ring":
        near = min(config.count or 1, count - 1)
        found = {tuple(sorted((n, (n + step) % count))) for n in range(count) for step in range(1, near + 1)}
        return sorted((first, second) for first, second in found)
    chance = random.Random(seed)
    order = chance.sample(range(count), count)
    chain = [(order[n], order[n + 1]) for n in range(0, count - 1, 2)] + ([(order[-1], order[0])] if count % 2 else [])
    covering = [(min(pair), max(pair)) for pair in chain]
    others = [pair for pair in every if pair not in set(covering)]
    more = max((config.count or count) - len(covering), 0)
    return sorted([*covering, *chance.sample(others, min(more, len(others)))])


def results_of(count: int, comparisons: Sequence[Comparison], config: JudgeRewardConfig) -> list[ScoreResult]:
    """Return the score of each response: the mean outcome of its comparisons."""
    by_pair = dict[Pair, list[Comparison]]()
    for comparison in comparisons:
        by_pair.setdefault(comparison.pair, []).append(comparison)
    return [
        _result(number, {pair: own for pair, own in by_pair.items() if number in pair}, config)
        for number in range(count)
    ]


def _result(number: int, by_pair: dict[Pair, list[Comparison]], config: JudgeRewardConfig) -> ScoreResult:
    assert config.pairwise is not None
    outcomes, told = list[float](), list[str]()
    for pair, comparisons in by_pair.items():
        given = [each.outcome for each in comparisons if each.outcome is not None]
        if len(given) < (config.quorum or config.verdicts):
            continue
        outcome = combine_outcomes(given, config)
        outcomes.append(outcome if number == pair[0] else 1 - outcome)
        told.append(_told(number, pair, outcomes[-1], comparisons))
    own = [each for comparisons in by_pair.values() for each in comparisons]
    verdicts = [verdict for each in own for verdict in (each.forwards, each.backwards)]
    # each comparison is of two responses, which share its cost
    tokens, seconds = sum(each.tokens for each in verdicts) // 2, sum(each.seconds for each in verdicts) / 2
    raw = joined({f"{n // 2} {'AB'[n % 2]}": each.raw for n, each in enumerate(verdicts)})
    if not outcomes or len(outcomes) < config.pairwise.minimum * len(by_pair):
        return attrs.evolve(failure(verdicts, 1), tokens=tokens, seconds=seconds, raw=raw)
    metrics = {
        "comparisons": float(len(outcomes)),
        "failed_comparisons": float(len(by_pair) - len(outcomes)),
        "inconsistent": statistics.fmean(each.is_inconsistent for each in own),
    }
    return ScoreResult(
        score=statistics.fmean(outcomes),
        metrics=metrics,
        explanation="\n".join(told),
        raw=raw,
        tokens=tokens,
        seconds=seconds,
    )


def _told(number: int, pair: Pair, outcome: float, comparisons: Sequence[Comparison]) -> str:
    other = pair[1] if number == pair[0] else pair[0]
    word = "ties with" if outcome == 0.5 else "is better than" if outcome > 0.5 else "is worse than"
    judgement = comparisons[0].forwards.judgement
    why = judgement.explanation if judgement is not None and judgement.explanation else ""
    return f"{word} response {other}" + (f" (A is response {pair[0]}): {why}" if why else "")
