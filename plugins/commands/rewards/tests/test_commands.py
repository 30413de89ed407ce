"""``jackfield rewards try`` and ``rescore``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from pyarrow import parquet

from jackfield.cli import main
from jackfield_archive.records import RewardRecords
from jackfield_rewards.differences import Pair, compared, ranks, table


def done(*arguments: object) -> tuple[int, str]:
    """Return the exit code of `jackfield rewards ARGUMENTS` and what it printed."""
    result = CliRunner().invoke(main, ["rewards", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def found(*arguments: object) -> Any:
    """Return what a command prints as JSON, whatever its exit code is."""
    return json.loads(done(*arguments, "--json")[1])


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """A run's configuration."""
    values = {
        "reward": "rules",
        "data": {"format": {"prompt_key": "problem", "answer_key": "target"}},
        "model": {"path": "nowhere"},
        "reward_service": {"retries": 0},
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    return tmp_path / "run.yaml"


def write_lines(file: Path, *lines: Any) -> Path:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def test_a_few_lines_are_scored_before_a_run(rules: Path, tmp_path: Path) -> None:
    """As many as are asked for; a response may be a text or messages."""
    right = {"problem": "2+2?", "target": "#### 4", "response": "#### 4"}
    spoken = {"problem": "2+2?", "target": "#### 4", "response": [{"role": "assistant", "content": "#### 5"}]}
    data = write_lines(tmp_path / "data.jsonl", right, spoken, {"problem": "not read"})
    rows = found("try", rules, data, "--rows", 2)
    assert [(row["line"], row["score"], row["status"]) for row in rows] == [("1", 1.0, "ok"), ("2", 0.0, "ok")]
    assert rows[0]["dimensions"]["correct"] == 1.0
    code, text = done("try", rules, data, "--rows", 2)
    assert (code, text.split()[:4]) == (0, ["LINE", "SCORE", "STATUS", "SECONDS"])
    assert "correct: 1" in text


def test_a_line_without_a_score_is_a_failure(rules: Path, tmp_path: Path) -> None:
    """The others are printed, with the reason of the one that failed."""
    lines = [{"problem": "2+2?", "target": target, "answer": "#### 4"} for target in ("#### 4", "none", "#### 4")]
    data = write_lines(tmp_path / "data.jsonl", *lines)
    assert done("try", rules, data, "--response", "answer")[0] == 1
    rows = found("try", rules, data, "--response", "answer")
    assert [row["status"] for row in rows] == ["ok", "failed", "ok"]
    assert rows[1]["error"]


def test_an_explanation_that_no_terminal_can_show_is_shown(tmp_path: Path) -> None:
    file, code = tmp_path / "odd.yaml", tmp_path / "odd.py"
    code.write_text("def compute_score(solution_str, **_):\n    return {'score': 1, 'explanation': 'half \\ud800'}\n")
    file.write_text(f"reward: {{name: function, path: '{code}:compute_score'}}\n")
    data = write_lines(tmp_path / "data.jsonl", {"question": "2+2?", "answer": "4", "response": "4"})
    assert done("try", file, data)[0] == 0
    assert found("try", file, data)[0]["explanation"].startswith("half ")


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([{"problem": "2+2?", "target": "#### 4"}], "data.malformed"),
        ([{"target": "#### 4", "response": "4"}], "data.malformed"),
        ([], "data.malformed"),
    ],
)
def test_lines_that_are_no_tasks_are_refused(rules: Path, tmp_path: Path, lines: list[Any], code: str) -> None:
    data = write_lines(tmp_path / "data.jsonl", *lines)
    assert found("try", rules, data)["error"]["code"] == code


def test_a_file_without_a_reward_is_refused(tmp_path: Path) -> None:
    data, file = (
        write_lines(tmp_path / "data.jsonl", {"question": "?", "answer": "4", "response": "4"}),
        tmp_path / "file.yaml",
    )
    for text, code in (
        ("name: x", "config.missing-key"),
        ("{", "config.unreadable"),
        ("reward: nothing", "plugin.not-found"),
        ("reward: {name: rules, methods: exact}", "config.unknown-key"),
    ):
        file.write_text(text)
        assert found("try", file, data)["error"]["code"] == code


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """The folder of a run with kept rewards: the length of the response, for two groups of one data source each."""
    folder = tmp_path / "run"
    folder.mkdir()
    file = folder / "length.py"
    file.write_text(_LENGTH)
    reward = {"name": "function", "path": f"{file}:compute_score"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"reward": reward, "deadlines": {"reward": 20.0}}))
    kept = RewardRecords(folder / "scores", "worker-0")
    for group, source in (("train/0/0", "sums"), ("train/0/1", "words")):
        for number in range(3):
            text = "x" * number if group.endswith("0") else "broken"[: 2 * number + 2]
            shared = {"group": group, "data_source": source, "prompt": "?", "ground_truth": "", "status": "ok"}
            row = {**shared, "key": f"{group}/{number}", "response": text, "score": float(len(text))}
            kept.add([{**row, "extra_info": {"times": 1}}])
    kept.close()
    return folder


_LENGTH = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) * extra_info["times"]
"""
_OTHER = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if solution_str == "broken":
        raise ValueError("it is broken")
    return 2 - len(solution_str) if data_source == "sums" else len(solution_str)
"""


def test_the_same_reward_changes_nothing(run_folder: Path) -> None:
    """Without --with, the run's own reward scores again."""
    changes = found("rescore", run_folder)
    assert changes["reward"] == "function"
    assert (changes["all"]["samples"], changes["all"]["changed"], changes["all"]["rank_correlation"]) == (6, 0.0, 1.0)
    assert changes["largest"] == []


def test_another_reward_shows_its_differences_and_writes_new_columns(run_folder: Path, tmp_path: Path) -> None:
    """The run's files stay as they are, and files that are there are not overwritten."""
    (tmp_path / "other.py").write_text(_OTHER)
    reward = {"name": "function", "path": f"{tmp_path / 'other.py'}:compute_score"}
    file, out, kept = tmp_path / "other.yaml", tmp_path / "out", run_folder / "scores" / "worker-0-00001.parquet"
    file.write_text(yaml.safe_dump({"reward": reward, "reward_service": {"retries": 0}}))
    before = kept.read_bytes()
    for number, source in enumerate((run_folder, run_folder / "scores", kept)):
        changes = found("rescore", source, "--with", file, "--out", out / str(number), "--largest", 1)
        assert (changes["all"]["samples"], changes["all"]["compared"], changes["all"]["no_longer_scored"]) == (6, 5, 1)
        sums, words = changes["data_sources"]["sums"], changes["data_sources"]["words"]
        assert (sums["mean_old"], sums["mean_new"], sums["rank_correlation"]) == (1.0, 1.0, -1.0)
        assert (words["changed"], words["rank_correlation"], words["ranked_groups"]) == (0.0, 1.0, 1)
        assert changes["largest"] == [{"key": "train/0/0/0", "old": 0.0, "new": 2.0, "change": 2.0}]
        assert "it is broken" in changes["failed"][0]["error"]
    assert kept.read_bytes() == before
    written = parquet.read_table(out / "0" / kept.name)
    assert written["score_2"].to_pylist() == [2.0, 1.0, 0.0, 2.0, 4.0, None]
    assert written["score"].to_pylist() == [0.0, 1.0, 2.0, 2.0, 4.0, 6.0]
    lineage = json.loads((out / "0" / "lineage.json").read_text())["files"][kept.name]
    assert (lineage["reward"], lineage["settings"]["path"], lineage["source"]) == (
        "function",
        reward["path"],
        str(kept),
    )
    assert lineage["column"] == 2
    assert found("rescore", run_folder, "--with", file, "--out", out / "0")["error"]["code"] == "run.storage"
    code, text = done("rescore", run_folder, "--with", file)
    assert code == 0
    for part in ("6 samples of 1 files by function", "rank correlation", "train/0/0/0", "it is broken", "words"):
        assert part in text, part


def test_a_source_without_rewards_is_refused(run_folder: Path, tmp_path: Path) -> None:
    """An empty folder, a run that has kept nothing, and files for which no reward is known."""
    (tmp_path / "empty").mkdir()
    assert found("rescore", tmp_path / "empty")["error"]["code"] == "queue.invalid"
    kept = run_folder / "scores" / "worker-0-00001.parquet"
    kept.rename(tmp_path / "empty" / "alone.parquet")
    assert found("rescore", tmp_path / "empty" / "alone.parquet")["error"]["code"] == "config.missing-key"
    assert found("rescore", run_folder)["error"]["code"] == "queue.invalid"
    (run_folder / "scores" / ".worker-0-00002.jsonl").touch()
    assert found("rescore", run_folder)["error"]["found"] == "their journal"


def test_ranks_of_equal_values_are_their_mean() -> None:
    assert ranks([3.0, 1.0, 3.0, 2.0]) == [2.5, 0.0, 2.5, 1.0]
    assert ranks([]) == []


def test_groups_without_an_order_do_not_count() -> None:
    """A group whose old or new scores are all equal has no rank correlation; a table without numbers has dashes."""
    pairs = [Pair(key=str(n), group="g", data_source="", old=1.0, new=float(n)) for n in range(3)]
    summary = compared(pairs, 5)
    assert (summary["all"]["rank_correlation"], summary["all"]["ranked_groups"]) == (None, 0)
    assert "  -  " in table(compared([], 5))


@pytest.mark.parametrize(
    ("values", "code", "where"),
    [
        ({"rewards": {}}, "config.invalid-value", "rewards"),
        ({}, "config.missing-key", "rewards"),
        ({"rewards": {"a.b": {"reward": "rules"}}}, "config.invalid-value", "rewards"),
        ({"rewards": {"a": {}}}, "config.missing-key", "rewards.a.reward"),
        (
            {"rewards": {"a": {"reward": "rules", "reward_servise": {}}}},
            "config.unknown-key",
            "rewards.a.reward_servise",
        ),
        ({"rewards": {"a": {"reward": "rules"}}, "host": "0.0.0.0"}, "config.invalid-value", "host"),
        (
            {"rewards": {"a": {"reward": "rules", "reward_service": {"on_failure": "stop"}}}},
            "config.invalid-value",
            "rewards.a.reward_service.on_failure",
        ),
        (
            {"rewards": {"a": {"reward": "rules", "reward_service": {"keep": False}}}},
            "config.invalid-value",
            "rewards.a.reward_service.keep",
        ),
        ({"rewards": {"a": {"reward": {"name": "nothing"}}}}, "plugin.not-found", None),
        ({"rewards": {"a": {"reward": "rules"}}, "token_env": "NO_SUCH_TOKEN"}, "config.invalid-value", "token_env"),
    ],
)
def test_a_wrong_file_of_a_service_is_refused(tmp_path: Path, values: Any, code: str, where: str | None) -> None:
    """The error names the setting, and no service starts."""
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"folder": str(tmp_path / "service"), **values}))
    error = found("serve", file)["error"]
    assert (error["code"], error["where"]) == (code, where)
