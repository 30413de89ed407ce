"""Comparisons in pairs: which, in which order, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.sdk import structure
from jackfield_bad_service import BadService, bad_service
from jackfield_fake_judge import completion, prefers_greater, responses, says
from jackfield_reward_judge.pairs import pairs_of
from jackfield_reward_judge.reward import JudgeReward
from jackfield_reward_judge.settings import JudgeRewardConfig, PairwiseConfig


def group(*texts: str, **fields: Any) -> list[ScoreRequest]:
    given = {"data_source": "t", "ground_truth": "5", "group_id": "train/0", "deadline_seconds": 30.0, **fields}
    return [ScoreRequest(solution_str=text, idempotency_key=f"train/0/{n}", **given) for n, text in enumerate(texts)]


def compared(
    requests: Sequence[ScoreRequest],
    right: Callable[[Any], Any] = prefers_greater,
    script: Sequence[str] = (),
    retries: int = 0,
    pairwise: Any = None,
    **settings: Any,
) -> tuple[list[ScoreResult], BadService]:
    async def main() -> tuple[list[ScoreResult], BadService]:
        async with bad_service(right) as service:
            given = {"url": f"{service.address}/v1", "model": "m", "pairwise": pairwise or {}, **settings}
            agent = JudgeReward(structure(JudgeRewardConfig, given), RewardContext())
            assert agent.compares
            await agent.start()
            try:
                service.script = list(script)
                results = await agent.score_group(requests)
                for retry in range(1, retries + 1):
                    results = await agent.score_group([attrs.evolve(each, retry=retry) for each in requests])
                return list(results), service
            finally:
                await agent.close()

    return asyncio.run(main())


def test_the_score_is_the_share_of_comparisons_won() -> None:
    results, service = compared(group("3", "1", "2", "3"))
    assert [2.5 / 3, 0.0, 1 / 3, 2.5 / 3] == pytest.approx([each.score for each in results])
    assert 2 * (6 - 1) == len(service.bodies), "each pair in both orders, and equal texts not at all"
    shown = [tuple(responses(body)) for body in service.bodies]
    assert sorted(shown) == sorted((second, first) for first, second in shown)
    assert {"comparisons": 3.0, "failed_comparisons": 0.0, "inconsistent": 0.0} == results[0].metrics
    assert 1000 == sum(each.tokens for each in results), "the cost of a comparison is shared"
    assert str(results[1].explanation).startswith("is worse than response 0")
    assert "tie" not in str(results[1].raw)


def test_a_judge_that_prefers_a_place_gives_ties() -> None:
    results, _ = compared(group("3", "1", "2"), says('{"winner": "A"}'))
    assert [0.5] * 3 == [each.score for each in results]
    assert [1.0] * 3 == [each.metrics["inconsistent"] for each in results]


@pytest.mark.parametrize("winners", [("A", "tie"), ("tie", "B"), ("tie", "tie"), ("B", "B")])
def test_a_change_of_the_mind_is_a_tie(winners: tuple[str, str]) -> None:
    def right(body: Any) -> Any:
        return completion(f'{{"winner": "{winners[responses(body) == ["1", "3"]]}"}}')

    results, _ = compared(group("3", "1"), right)
    assert [0.5, 0.5] == [each.score for each in results]
    assert float(winners != ("tie", "tie")) == results[0].metrics["inconsistent"]


def test_a_response_alone_is_compared_with_the_ground_truth() -> None:
    better, _ = compared(group("7"))
    worse, _ = compared(group("3"))
    assert [1.0, 0.0] == [better[0].score, worse[0].score]
    (nothing,), service = compared(group("3", ground_truth=""))
    assert ("failed", True, []) == (nothing.status, nothing.is_final, service.bodies)


def test_several_judges_compare() -> None:
    def right(body: Any) -> Any:
        return prefers_greater(body) if body["model"] != "odd" else completion('{"winner": "A"}')

    judges = [{"model": name} for name in ("m", "n", "odd")]
    mean, _ = compared(group("3", "1"), right, judges=judges)
    majority, _ = compared(group("3", "1"), right, judges=judges, combine="majority")
    assert ([2.5 / 3, 0.5 / 3], [1.0, 0.0]) == (
        pytest.approx([each.score for each in mean]),
        [each.score for each in majority],
    )


def test_failed_comparisons_leave_a_score_if_enough_are_left() -> None:
    """One order of one of three pairs fails: two responses have one comparison of two."""
    results, _ = compared(group("3", "1", "2"), script=["broken"])
    assert ["ok"] * 3 == [each.status for each in results]
    assert 2.0 == sum(each.metrics["failed_comparisons"] for each in results)
    results, _ = compared(group("3", "1", "2"), script=["busy"], pairwise={"minimum": 1.0})
    assert ["failed", "failed", "ok"] == sorted(each.status for each in results)
    assert {7.0, None} == {each.retry_after for each in results}


def test_a_retry_asks_only_what_failed() -> None:
    results, service = compared(group("3", "1", "2"), script=["busy"], retries=1, pairwise={"minimum": 1.0})
    assert [1.0, 0.0, 0.5] == [each.score for each in results]
    assert 6 + 1 == len(service.bodies)


def test_no_group_is_no_result() -> None:
    assert [] == compared([])[0]


@pytest.mark.parametrize("count", range(9))
@pytest.mark.parametrize("chosen", [None, 1, 3, 100])
@pytest.mark.parametrize("kind", ["ring", "sample"])
def test_pairs_are_distinct_and_of_all(kind: Any, chosen: int | None, count: int) -> None:
    config = PairwiseConfig(pairs=kind, count=chosen)
    found = pairs_of(count, config, "seed")
    assert found == pairs_of(count, config, "seed")
    assert len(found) == len(set(found))
    assert all(0 <= first < second < count for first, second in found)
    assert (set(range(count)) if count > 1 else set()) == {number for pair in found for number in pair}
    if count > 3 and chosen is None:
        assert count == len(found)
    if kind == "sample" and count > 3:
        assert min(max(chosen or count, (count + 1) // 2), count * (count - 1) // 2) == len(found)


def test_all_pairs_and_other_seeds() -> None:
    assert [(0, 1), (0, 2), (1, 2)] == pairs_of(3, PairwiseConfig(), "")
    sample = PairwiseConfig(pairs="sample", count=6)
    assert len({tuple(pairs_of(8, sample, str(seed))) for seed in range(5)}) > 1
