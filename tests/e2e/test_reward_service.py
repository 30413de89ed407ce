"""The reward service in real runs: records, counters, cache, policies, and the run's own model as a judge."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import JackfieldError

pytest.importorskip("torch")
parquet = pytest.importorskip("pyarrow.parquet")
pytestmark = pytest.mark.timeout(180)

Run = Callable[..., tuple[Any, list[dict[str, Any]]]]

REWARD = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(Path(__file__).with_name("calls"), "a") as calls:
        calls.write("call\\n")
    return {"score": float(len(solution_str) % 2), "length": len(solution_str)}

seen = set()

def flaky(data_source, solution_str, ground_truth, extra_info):
    if solution_str not in seen:
        seen.add(solution_str)
        raise ConnectionError("try again")
    return float(len(solution_str) % 2)

def half(data_source, solution_str, ground_truth, extra_info):
    if len(solution_str) % 3 == 0:
        raise ValueError("not this one")
    return float(len(solution_str) % 2)
"""

#: A reward plugin that asks the run's own model; it is not installed, and replaces `rules` in its process.
JUDGE = """
from jackfield.abc.reward import RewardAgent, ScoreResult

class Judge(RewardAgent):
    generates = True

    async def compute_score(self, request):
        assert request.messages[0]["role"] == "user", request
        assert request.group_size == 4 and request.group_id, request
        assert [part.author for part in request.parts] == ["model"], request
        messages = [{"role": "user", "content": "Rate: " + request.solution_str}]
        answer = await self.context.generate("policy", messages, max_new_tokens=4, temperature=1.0)
        self.context.count("asked", 1)
        score, cost = float(len(answer.text) % 2), answer.tokens
        return ScoreResult(score=score, raw=answer.text, tokens=cost, explanation="because")
"""


@pytest.fixture
def reward(tmp_path: Path) -> Callable[[str], str]:
    def named(function: str) -> str:
        file = tmp_path / "my_reward.py"
        file.write_text(REWARD)
        return f"reward={{name: function, path: '{file}:{function}', try_first: false}}"

    return named


def rows(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "scores").glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist()]


def test_scores_are_kept_as_a_data_set(small_run: Run, reward: Callable[[str], str], tmp_path: Path) -> None:
    result, _ = small_run("kept", reward("compute_score"))
    kept = rows(result.folder)
    assert len(kept) == 3 * 16
    assert {"ok"} == {row["status"] for row in kept}
    assert len({row["key"] for row in kept}) == len(kept)
    for row in kept:
        assert float(len(row["response"]) % 2) == row["score"]
        assert {"length": len(row["response"])} == json.loads(row["metrics"])
        assert row["prompt"]
        assert ("function", row["key"].rsplit("/", 2)[0]) == (row["reward"], row["group"])
    assert 1 == len({row["run"] for row in kept})
    result, _ = small_run("unkept", reward("compute_score"), "reward_service.keep=false")
    assert not (result.folder / "scores").exists()


def test_a_second_run_finds_the_scores_of_the_first(
    small_run: Run, reward: Callable[[str], str], tmp_path: Path
) -> None:
    """The version follows from the file, so an edit makes them invalid."""
    cache, calls = f"reward_service.cache={tmp_path / 'cache'}", tmp_path / "calls"
    first, _ = small_run("first", reward("compute_score"), cache)
    made = len(calls.read_text().splitlines())
    asked = {(row["prompt"], row["response"]) for row in rows(first.folder)}
    assert len(asked) == made, "equal answers of a task are scored once"
    second, again = small_run("second", reward("compute_score"), cache)
    assert made == len(calls.read_text().splitlines())
    assert 48 == sum(line.get("reward/cached", 0.0) for line in again)
    assert [row["score"] for row in rows(first.folder)] == [row["score"] for row in rows(second.folder)]
    assert {True} == {row["cached"] for row in rows(second.folder)}
    file = tmp_path / "my_reward.py"
    file.write_text(REWARD + "\n# edited\n")
    edited = f"reward={{name: function, path: '{file}:compute_score', try_first: false}}"
    small_run("third", edited, cache)
    assert 2 * made == len(calls.read_text().splitlines())


def test_retries_are_counted(small_run: Run, reward: Callable[[str], str]) -> None:
    _, lines = small_run("flaky", reward("flaky"), "reward_service.backoff_seconds=0")
    assert sum(line.get("reward/retries", 0.0) for line in lines) > 0


def test_a_group_goes_on_with_enough_rollouts(small_run: Run, reward: Callable[[str], str]) -> None:
    given = ("reward_service.retries=0", "data.minimum_rows=1")
    result, lines = small_run("few", reward("half"), *given)
    kept = rows(result.folder)
    trained = sum(row["status"] == "ok" for row in kept)
    assert trained < len(kept)
    assert 3 == len([line for line in lines if "seconds/step" in line or "reward/mean" in line])


def test_a_run_stops_at_the_first_failure_if_asked(small_run: Run, reward: Callable[[str], str]) -> None:
    with pytest.raises(JackfieldError) as caught:
        small_run("stops", reward("half"), "reward_service.on_failure=stop", "reward_service.retries=0")
    assert "reward.failed" == caught.value.code
    assert "not this one" in str(caught.value)


@pytest.mark.parametrize("sync_offset", [0, 1])
def test_a_reward_may_ask_the_model_of_the_run(
    small_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sync_offset: int
) -> None:
    """The devices are the replicas' while it does, so a run on shared devices does not wait for itself."""
    from jackfield.plugins.registry import PluginRecord

    folder = tmp_path / "judge"
    folder.mkdir()
    (folder / "my_judge_plugin.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(str(folder))
    build = PluginRecord.build

    def replaced(self: PluginRecord, settings: Any, context: Any, where: str = "") -> Any:
        if where != "reward":
            return build(self, settings, context, where)
        import my_judge_plugin

        return my_judge_plugin.Judge(None, context)

    monkeypatch.setattr(PluginRecord, "build", replaced)
    try:
        result, lines = small_run("judged", f"schedule.sync_offset={sync_offset}", "deadlines.batch=60")
    finally:
        sys.modules.pop("my_judge_plugin", None)
    assert 48 == sum(line.get("reward/asked", 0.0) for line in lines)
    assert sum(line.get("reward/tokens", 0.0) for line in lines) > 48
    kept = rows(result.folder)
    assert {"because"} == {row["explanation"] for row in kept}
    assert all(float(len(row["raw"]) % 2) == row["score"] and row["tokens"] > 0 for row in kept)
