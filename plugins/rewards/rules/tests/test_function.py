"""The built-in reward agent ``function``: a plain compute_score, and what is not a score."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, PluginError, RewardError, RunError
from jackfield.settings import structure
from jackfield_reward_rules.function import FunctionReward, FunctionRewardConfig
from jackfield_testing import refused

USER_CODE = """
import asyncio

def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    print("scoring", solution_str)
    return (1.0 if solution_str == ground_truth else 0.0) + bonus

def echo(data_source, solution_str, ground_truth, extra_info):
    return extra_info[solution_str]

def everything(data_source, solution_str, ground_truth, extra_info):
    return {"score": len(data_source + solution_str + ground_truth), "steps": extra_info["steps"]}

async def gently(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0)
    return True

def hang(data_source, solution_str, ground_truth, extra_info):
    while True:
        pass

class Scorer:
    def __init__(self, scale):
        self.scale = scale
    def compute_score(self, data_source, solution_str, ground_truth, extra_info):
        return self.scale * float(ground_truth)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(USER_CODE)
    return path


def request(solution: str = "7", truth: str = "7", seconds: float = 30.0, **extra: Any) -> ScoreRequest:
    return ScoreRequest(
        data_source="gsm8k", solution_str=solution, ground_truth=truth, extra_info=extra, deadline_seconds=seconds
    )


def score(path: str, *requests: ScoreRequest, **settings: Any) -> list[ScoreResult]:
    async def main() -> list[ScoreResult]:
        agent = FunctionReward(FunctionRewardConfig(path=path, **settings), RewardContext())
        try:
            return list(await asyncio.gather(*(agent.compute_score(each) for each in requests)))
        finally:
            await agent.close()
            assert () == agent._pool.pids

    return asyncio.run(main())


def test_a_function_in_the_style_of_verl(file: Path) -> None:
    results = score(f"{file}:compute_score", request(), request("8"))
    assert [ScoreResult(score=1.0), ScoreResult(score=0.0)] == results


def test_keywords_reach_functions_and_constructors(file: Path) -> None:
    [result] = score(f"{file}:compute_score", request(), keywords={"bonus": 0.5})
    assert 1.5 == result.score
    [result] = score(f"{file}:Scorer", request(truth="3"), keywords={"scale": 2})
    assert 6.0 == result.score


def test_further_numbers_become_metrics(file: Path) -> None:
    [result] = score(f"{file}:everything", request("ab", "c", steps=4))
    assert ScoreResult(score=8.0, metrics={"steps": 4.0}) == result


def test_coroutines_and_truth_values(file: Path) -> None:
    assert [ScoreResult(score=1.0)] == score(f"{file}:gently", request())


@pytest.mark.parametrize(
    "value",
    [None, float("nan"), float("inf"), "1.0", [1.0], {"points": 1}, {"score": None}, {"score": 1, "m": float("nan")}],
)
def test_what_is_not_a_score_fails_and_is_never_0(file: Path, value: object) -> None:
    [result] = score(f"{file}:echo", request("it", it=value))
    assert ("failed", None) == (result.status, result.score)
    assert "reward.output" in (result.error or "")
    assert f"{file}:echo" in (result.error or "")


def test_exceptions_and_deadlines_are_statuses(file: Path) -> None:
    [failed] = score(f"{file}:echo", request("missing"))
    assert ("failed", None) == (failed.status, failed.score)
    assert "KeyError: 'missing'" in (failed.error or "")
    [late] = score(f"{file}:hang", request(seconds=0.5))
    assert ("timeout", None) == (late.status, late.score)
    assert "my_reward.py:hang" in (late.error or "")


def test_one_hanging_sample_costs_only_itself(file: Path) -> None:
    """With one worker, others wait for the kill and are then scored by the next process."""
    path = file.with_name("mixed.py")
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    while solution_str == 'hang':\n        pass\n    return 1\n"
    )
    results = score(f"{path}:compute_score", request(), request("hang", seconds=1.0), request(), request())
    assert ["ok", "timeout", "ok", "ok"] == [result.status for result in results]


def test_a_wrong_path_shows_at_the_start_of_a_run(file: Path) -> None:
    async def main() -> None:
        agent = FunctionReward(FunctionRewardConfig(path=f"{file}:nothing"), RewardContext())
        with pytest.raises(RunError) as caught:
            await agent.start()
        assert "worker.start" == caught.value.code
        assert "nothing" in str(caught.value.where)
        await agent.close()

    asyncio.run(main())


def test_a_missing_interpreter_is_refused_with_the_settings(file: Path) -> None:
    with pytest.raises(PluginError) as caught:
        FunctionRewardConfig(path=f"{file}:echo", python="/nowhere/bin/python")
    found = (caught.value.code, caught.value.where, caught.value.found)
    assert ("plugin.interpreter", "reward.python", "no such file") == found


def test_settings_are_structured_and_checked() -> None:
    settings = structure(FunctionRewardConfig, {"path": "a.py:f", "keywords": {"x": 1}, "memory_bytes": None})
    assert {"x": 1} == settings.keywords
    assert settings == structure(FunctionRewardConfig, attrs.asdict(settings))
    with refused("config.unknown-key", "'workers'"):
        structure(FunctionRewardConfig, {"path": "a.py:f", "worker": 1})
    with pytest.raises(ConfigError) as caught:
        structure(FunctionRewardConfig, {"path": "a.py:f", "workers": 0})
    assert "config.invalid-value" == caught.value.code
    assert "workers" in str(caught.value.where)


VERL = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "sums" and ground_truth == {"target": ["7"]}, ground_truth
    return {"score": 1.0, "index": extra_info["index"]}
"""


def test_verls_columns_reach_verls_signature(tmp_path: Path) -> None:
    """A record of verl's Parquet files has its own extra_info, and a ground truth of any type."""
    (file := tmp_path / "verl.py").write_text(VERL)
    own = {"reward_model": {"style": "rule", "ground_truth": {"target": ["7"]}}, "extra_info": {"index": 5}}
    truth = json.dumps({"target": ["7"]})
    request = ScoreRequest(data_source="sums", solution_str="7", ground_truth=truth, extra_info=own)
    [result] = score(f"{file}:compute_score", request)
    assert ("ok", 1.0, {"index": 5.0}) == (result.status, result.score, result.metrics)


@pytest.mark.parametrize(
    ("function", "refused"),
    [
        ("def f(solution_str): return float(solution_str)", False),
        ("def f(solution_str): raise KeyError('column')", True),
        ("def f(completions, difficulty, **_): return [1.0] * len(completions)", True),  # the record has no such column
        ("def f(completions, level, **_): return level", False),
        ("def f(completions, **_): return 'high'", True),
        ("import time\ndef f(solution_str): time.sleep(30)", False),  # its first call may be slow
    ],
)
def test_a_function_is_tried_on_the_first_task(tmp_path: Path, function: str, refused: bool) -> None:
    (file := tmp_path / "mine.py").write_text(function)
    fields: dict[str, Any] = {"extra_info": {"level": 2}, "deadline_seconds": 0.5}
    example = ScoreRequest(data_source="", solution_str="7", ground_truth="7", group_id="g", **fields)

    async def start(**settings: Any) -> None:
        agent = FunctionReward(FunctionRewardConfig(path=f"{file}:f", **settings), RewardContext(example=example))
        try:
            await agent.start()
        finally:
            await agent.close()

    asyncio.run(start(try_first=False))
    if not refused:
        asyncio.run(start())
        return
    with pytest.raises(RewardError) as caught:
        asyncio.run(start())
    assert ("reward.first-task", f"{file}:f") == (caught.value.code, caught.value.where)
    assert "first task" in caught.value.message
