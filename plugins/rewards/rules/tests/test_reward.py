"""The agent: scores, statuses, deadlines and what is left behind."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from typing import Any

import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.sdk import structure
from jackfield_reward_rules.judge import Config
from jackfield_reward_rules.reward import RulesReward

#: Answers on which sympy computes for ever.
ENDLESS = [r"\boxed{9!!!!!!!!!}", "$10^{10^{10}}$"]


def request(solution: str, truth: str = "#### 72", seconds: float = 60.0) -> ScoreRequest:
    return ScoreRequest(data_source="gsm8k", solution_str=solution, ground_truth=truth, deadline_seconds=seconds)


def score(*requests: ScoreRequest, **settings: Any) -> list[ScoreResult]:
    async def main() -> list[ScoreResult]:
        agent = RulesReward(structure(Config, settings), RewardContext())
        await agent.start()
        try:
            return list(await asyncio.gather(*(agent.compute_score(each) for each in requests)))
        finally:
            await agent.close()
            assert () == agent._pool.pids, "no process is left"

    return asyncio.run(main())


def test_scores_and_metrics() -> None:
    right, wrong, formless = score(request("#### 72"), request("#### 7"), request("?"), format_score=0.1, correct=2)
    assert (
        ScoreResult(score=2.0, metrics={"correct": 1.0, "well_formed": 1.0, "timeout": 0.0, "checker_failed": 0.0})
        == right
    )
    assert (
        ScoreResult(score=0.1, metrics={"correct": 0.0, "well_formed": 1.0, "timeout": 0.0, "checker_failed": 0.0})
        == wrong
    )
    assert (
        ScoreResult(score=0.0, metrics={"correct": 0.0, "well_formed": 0.0, "timeout": 0.0, "checker_failed": 0.0})
        == formless
    )


def test_without_a_format_score_every_wrong_answer_is_incorrect() -> None:
    assert [-1.0, -1.0] == [each.score for each in score(request("#### 7"), request("?"), incorrect=-1)]


@pytest.mark.parametrize("method", ["exact", "math"])
def test_a_broken_ground_truth_is_a_failure_and_no_score(method: str) -> None:
    settings = {"ground_truth_pattern": "#### (.*)", "pattern": "#### (.*)"}
    [result] = score(request("#### 72", truth="72"), method=method, **settings)
    assert ("failed", None) == (result.status, result.score)
    assert "the ground truth has no answer" in (result.error or "")


@pytest.mark.parametrize("answer", ENDLESS)
def test_mathematics_without_end_is_killed_and_costs_only_itself(answer: str) -> None:
    requests = (request("$72$", "72"), request(answer, "72"), request("$71$", "72"))
    results = score(*requests, method="math", seconds=2.0, on_timeout="fail")
    assert ["ok", "timeout", "ok"] == [result.status for result in results]
    assert [1.0, None, 0.0] == [result.score for result in results]
    assert "to answer" in (results[1].error or "")


@pytest.mark.timeout(180)
@pytest.mark.parametrize("answer", ENDLESS)
def test_an_answer_that_makes_the_checker_time_out_is_wrong(answer: str) -> None:
    """Nobody gains by it: it has the score of a wrong answer, and is counted."""
    requests = (request("$72$", "72"), request(answer, "72"), request("$71$", "72"))
    results = score(*requests, method="math", seconds=2.0, incorrect=-1.0)
    assert [("ok", 1.0), ("ok", -1.0), ("ok", -1.0)] == [(each.status, each.score) for each in results]
    assert [0.0, 1.0, 0.0] == [each.metrics["timeout"] for each in results]


@pytest.mark.timeout(180)
def test_a_ground_truth_without_end_is_a_failure_and_no_score() -> None:
    """The task is broken, and no response is wrong by it."""
    broken, sound = score(
        request("$5$", "9!!!!!!!!!!", seconds=20.0), request("$5$", "5", seconds=20.0), method="math", seconds=1.0,
        ground_truth_pattern=None,
    )  # fmt: skip
    assert (("failed", None), ("ok", 1.0)) == ((broken.status, broken.score), (sound.status, sound.score))


def test_an_endless_answer_is_wrong_though_the_deadline_of_a_request_comes_first() -> None:
    [result] = score(request(ENDLESS[0], "4", seconds=4.0), method="math", seconds=60.0)
    assert ("ok", 0.0, 1.0) == (result.status, result.score, result.metrics["timeout"])


@pytest.mark.timeout(180)
def test_a_tower_of_powers_is_wrong_and_costs_only_itself() -> None:
    requests = [request(each, "72") for each in (r"\boxed{9**9**9**9}", "9**9**9**9", "$9^{9^{9^{9}}}$", "$72$")]
    results = score(*requests, method="math", seconds=1.0)
    assert [("ok", 0.0)] * 3 + [("ok", 1.0)] == [(each.status, each.score) for each in results]


def test_a_pattern_that_backtracks_does_not_hold_the_event_loop() -> None:
    """It goes to a worker, is killed there, and meanwhile others are scored here."""

    async def main() -> None:
        settings = {"pattern": r"((?:a|a)+)$", "ground_truth_pattern": None, "seconds": 1.0}
        agent = RulesReward(structure(Config, settings), RewardContext())
        began = Clock().time()
        slow = asyncio.create_task(agent.compute_score(request("a" * 80 + "b", "a")))
        await asyncio.sleep(0)
        assert 1.0 == (await agent.compute_score(request("aa", "aa"))).score
        assert not slow.done()
        assert 1.0 > Clock().time() - began
        late = await slow
        assert ("ok", 0.0, 1.0) == (late.status, late.score, late.metrics["timeout"])
        await agent.close()
        assert () == agent._pool.pids

    asyncio.run(main())


def test_a_slow_pattern_that_ends_in_time_is_a_score() -> None:
    """Only slower: what the event loop cannot wait for, a worker finishes."""
    [result] = score(request("a" * 20 + "b", "a"), pattern=r"((?:a|a)+)$", ground_truth_pattern=None, seconds=50)
    assert (
        ScoreResult(score=0.0, metrics={"correct": 0.0, "well_formed": 0.0, "timeout": 0.0, "checker_failed": 0.0})
        == result
    )


def test_cancelled_scores_leave_no_process() -> None:
    async def main() -> None:
        agent = RulesReward(Config(method="math"), RewardContext())
        await agent.start()
        call = asyncio.create_task(agent.compute_score(request(ENDLESS[0], "72")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert () == agent._pool.pids
        await agent.close()

    asyncio.run(main())


def test_settings_can_be_read_without_heavy_libraries() -> None:
    code = "import sys, jackfield_reward_rules.judge, jackfield_reward_rules.reward; "
    code += "print(sorted({'torch', 'numpy', 'sympy', 'math_verify'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == done.stdout.strip()


def test_exact_costs_little() -> None:
    """A step scores hundreds of samples beside generation (a generous bound: it takes microseconds)."""

    async def main() -> float:
        agent = RulesReward(Config(), RewardContext())
        requests = [request(f"steps and steps\n#### {number % 9}") for number in range(512)]
        began = Clock().time()
        for each in requests:
            await agent.compute_score(each)
        return (Clock().time() - began) / len(requests)

    assert 5e-4 > min(asyncio.run(main()) for _ in range(3))
