"""Tasks from the groups of an archive, and their rewards by another plugin."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, PluginNotFound, QueueError
from jackfield.sdk.archive import SavedSample
from jackfield_archive import COLUMNS, files_of, load_reward, read_samples, rescore, write_samples, write_tasks
from jackfield_archive.__main__ import main


def sample(key: str, group: str, reward: float, status: str = "trained", prompt: Sequence[int] = (1, 2)) -> SavedSample:
    """Return a sample of two response tokens: the number of its key, twice."""
    task = json.dumps({"data_source": "d", "ground_truth": key, "extra_info": {"of": group}, "reward": 0.0})
    values = {
        "prompt_ids": array("q", prompt),
        "response_ids": array("q", [int(key)] * 2),
        "response_mask": array("B", [1, 0]),
        "rollout_log_probs": array("f", [-0.5, -0.25]),
        "reward": array("f", [reward]),
        "advantages": array("f", [1.0, 1.0]),
    }
    cells = {name: (COLUMNS[name], each.tobytes()) for name, each in values.items()}
    cells["task"] = COLUMNS["task"], task.encode()
    return SavedSample(key=key, group=group, cells=cells, status=status, tags={"reward/old": 1.0, "rollout": 0})


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Two files: groups of different and of equal rewards, a failed sample, and prompts that differ."""
    folder = tmp_path / "archive"
    folder.mkdir()
    first = [sample("1", "a", 0.0), sample("2", "a", 1.0), sample("3", "a", 1.0), sample("4", "a", 2.0, "failed")]
    write_samples(folder / "q-1.parquet", [*first, sample("5", "b", 0.5), sample("6", "b", 0.5)])
    write_samples(folder / "q-2.parquet", [sample("7", "c", 0.0), sample("8", "c", 1.0, prompt=(3,))])
    return folder


def tasks(archive: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    count = write_tasks(archive, out, **options)
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert count == len(lines)
    return lines


def test_the_best_sample_of_each_group_is_the_answer(archive: Path, tmp_path: Path) -> None:
    """Among equal ones the first; failed ones are not used."""
    found = tasks(archive, tmp_path / "out.jsonl")
    assert [("a", [1, 2], [[[2, 2], [1, 0]]], [1.0]), ("b", [1, 2], [[[5, 5], [1, 0]]], [0.5])] == [
        (one["id"], one["prompt_ids"], one["answers"], one["rewards"]) for one in found[:2]
    ]
    assert ("c", [3], [[[8, 8], [1, 0]]]) == (found[2]["id"], found[2]["prompt_ids"], found[2]["answers"])
    assert ["a", "c"] == [one["id"] for one in tasks(archive, tmp_path / "good.jsonl", min_reward=0.6)]


def test_a_command_writes_tasks(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    done = CliRunner().invoke(main, ["tasks", str(archive), str(out), "--min-reward", "0.6"])
    assert (0, f"2 tasks in {out}\n") == (done.exit_code, done.output)
    done = CliRunner().invoke(main, ["tasks", str(tmp_path / "nothing"), str(out)])
    assert 1 == done.exit_code
    assert "there is no archive" in done.output


def test_pairs_are_of_one_prompt_and_different_rewards(archive: Path, tmp_path: Path) -> None:
    (found,) = tasks(archive, tmp_path / "out.jsonl", pairs=True)
    assert ("a", [[[2, 2], [1, 0]], [[1, 1], [1, 0]]], [1.0, 0.0]) == (found["id"], found["answers"], found["rewards"])


def test_a_file_of_tasks_is_complete_or_absent(archive: Path, tmp_path: Path) -> None:
    (archive / "q-2.parquet").write_bytes(b"PAR1")
    with pytest.raises(QueueError) as caught:
        write_tasks(archive, tmp_path / "out.jsonl")
    assert ("queue.invalid", str(archive / "q-2.parquet")) == (caught.value.code, caught.value.where)
    assert ["archive"] == [path.name for path in tmp_path.iterdir()]
    with pytest.raises(QueueError) as caught:
        write_tasks(tmp_path / "nothing", tmp_path / "out.jsonl")
    assert "queue.invalid" == caught.value.code


class Lengths(RewardAgent):
    """Scores by the ground truth; the one of sample 5 fails. Whole groups are ranked."""

    asked = 0

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.asked += 1
        if request.ground_truth == "5":
            raise ValueError("five")
        assert request.extra_info["of"] in "abc"
        return ScoreResult(score=float(request.ground_truth), metrics={"new": len(request.solution_str)})

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        best = max((one.score or 0.0) for one in scores)
        return [ScoreResult(score=one.score / best, metrics=one.metrics) if one.score else one for one in scores]


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def test_an_archive_gets_other_rewards(archive: Path, tmp_path: Path) -> None:
    """Whole groups are post-processed; a score that fails is a reason, and no reward; log-probs stay."""
    agent, out = Lengths(None, RewardContext()), tmp_path / "out"
    counts = asyncio.run(rescore(archive, out, agent, decode))
    assert ({"trained": 6, "failed": 1}, 7) == (counts, agent.asked)
    assert ["q-1.parquet", "q-2.parquet"] == [file.name for file in files_of(out)]
    found = {one.key: one for file in files_of(out) for one in read_samples(file)}
    rewards = {key: array("f", one.cells["reward"][1])[0] for key, one in found.items() if "reward" in one.cells}
    assert {"1": 1 / 3, "2": 2 / 3, "3": 1.0, "6": 1.0, "7": 7 / 8, "8": 1.0} == pytest.approx(rewards)
    assert "failed" == found["5"].status
    assert "five" in found["5"].tags["reason"]
    assert {"rollout": 0, "reward/new": 3.0} == found["1"].tags
    assert "advantages" not in found["1"].cells
    assert array("f", [-0.5, -0.25]).tobytes() == found["1"].cells["rollout_log_probs"][1]
    with pytest.raises(QueueError):
        asyncio.run(rescore(archive, archive, agent, decode))


def test_a_reward_is_made_from_its_section() -> None:
    agent = load_reward({"name": "rules", "method": "exact"})
    assert "exact" == agent.config.method
    with pytest.raises(PluginNotFound) as unknown:
        load_reward({"name": "nothing"})
    assert "rules" in str(unknown.value.expected)
    with pytest.raises(ConfigError):
        load_reward({"name": "rules", "methods": "exact"})


class Ranks(RewardAgent):
    """Scores a sample by its rank in its group, and not alone; how many calls it handles is known after the start."""

    most: int | None = None

    @property
    def concurrency(self) -> int | None:
        assert self.most is not None, "it is read after the start"
        return self.most

    async def start(self) -> None:
        self.most = 1

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        raise NotImplementedError

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        order = sorted(float(each.ground_truth) for each in requests)
        return [ScoreResult(score=float(order.index(float(each.ground_truth)))) for each in requests]


def test_groups_are_scored_whole_by_a_reward_that_compares(archive: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert {"trained": 7} == asyncio.run(rescore(archive, out, Ranks(None, RewardContext()), decode))
    found = {one.key: one for file in files_of(out) for one in read_samples(file)}
    rewards = {key: array("f", one.cells["reward"][1])[0] for key, one in found.items()}
    assert {"1": 0.0, "2": 1.0, "3": 2.0, "5": 0.0, "6": 1.0, "7": 0.0, "8": 1.0} == rewards
