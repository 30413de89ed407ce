"""Runs on data as others have it: verl's Parquet files, several sets, long prompts, and lists of rewards."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from jackfield.cli import main
from jackfield.errors import JackfieldError
from jackfield.plugins.hooks import RunStarted, hookimpl

from .conftest import QUICKSTART, Run

REWARDS = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert data_source == "acme/stories" and extra_info == {"index": extra_info["index"]}, extra_info
    return float(ground_truth in solution_str)

def length(prompts, completions, ability, **columns):
    assert ability == ["math"] * len(completions) and isinstance(completions[0], list)
    return [len(each[0]["content"]) / 100 for each in completions]

def column(completions, difficulty, **columns):
    return difficulty
"""


class Notes:
    """Keeps what a run says of its data."""

    def __init__(self) -> None:
        self.found: tuple[str, ...] = ()

    @hookimpl
    def run_started(self, event: RunStarted) -> None:
        self.found = event.notes


@pytest.fixture(scope="module")
def verl(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's problems in verl's layout, as Parquet, with one very long prompt."""
    problems = [json.loads(line) for line in (made / "problems.jsonl").read_text().splitlines()][:20]
    rows = [
        {
            "data_source": "acme/stories",
            "prompt": [{"role": "user", "content": each["question"] * (40 if number == 3 else 1)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": each["answer"][-1]},
            "extra_info": {"index": number},
        }
        for number, each in enumerate(problems)
    ]
    parquet.write_table(pa.Table.from_pylist(rows), file := tmp_path_factory.mktemp("verl") / "train.parquet")
    (file.parent / "rewards.py").write_text(REWARDS)
    return file


def test_verls_files_and_a_list_of_rewards(small_run: Run, verl: Path) -> None:
    """Recognised, without the long prompt, scored by verl's and TRL's functions together."""
    path, notes = verl.parent / "rewards.py", Notes()
    rewards = (
        f"[{{name: function, path: '{path}:compute_score', weight: 0.5}}, {{name: function, path: '{path}:length'}}]"
    )
    own = (f"data.train={verl}", f"reward={rewards}", "data.prompt_overflow=filter", "data.max_prompt_tokens=100")
    _, lines = small_run("verl", *own, hooks=[notes])
    assert [
        f"train tasks: {verl} has verl's prompts (prompt: prompt, ground truth: reward_model.ground_truth)",
        "train tasks: 1 of 20 prompts have more than 100 tokens and are left out",
    ] == list(notes.found)
    for line in (each for each in lines if each["kind"] == "step"):
        parts = 0.5 * line["reward/compute_score/mean"] + line["reward/length/mean"]
        assert line["reward/mean"] == pytest.approx(parts, abs=1e-5)
        assert line["reward/length/mean"] > 0


def test_a_reward_is_tried_before_anything_is_generated(small_run: Run, verl: Path, tmp_path: Path) -> None:
    reward = f"reward={{name: function, path: '{verl.parent / 'rewards.py'}:column'}}"
    with pytest.raises(JackfieldError) as caught:
        small_run("column", f"data.train={verl}", "data.prompt_overflow=filter", "data.max_prompt_tokens=100", reward)
    assert "reward.first-task" == caught.value.code
    assert "needs the column 'difficulty'" in str(caught.value.found)
    assert not [*tmp_path.glob("column/samples/*")]


def test_the_same_columns_are_recognised_when_a_reward_is_tried(verl: Path, tmp_path: Path) -> None:
    """verl's and TRL's records with a response, and one that fits no layout."""
    file = tmp_path / "tried.yaml"
    file.write_text("reward: {name: rules, method: exact, pattern: null, ground_truth_pattern: null}")
    record = parquet.read_table(verl).to_pylist()[0]
    trl = {"prompt": "What is 3 + 4?", "answer": "7", "completion": "7"}
    for number, (line, options) in enumerate(
        [({**record, "response": record["reward_model"]["ground_truth"]}, ()), (trl, ("--response", "completion"))]
    ):
        (data := tmp_path / f"{number}.jsonl").write_text(json.dumps(line))
        done = CliRunner().invoke(main, ["rewards", "try", str(file), str(data), "--json", *options])
        assert (0, 1.0) == (done.exit_code, json.loads(done.stdout)[0]["score"]), done.output
    (data := tmp_path / "odd.jsonl").write_text('{"text": "7", "response": "7"}')
    done = CliRunner().invoke(main, ["rewards", "try", str(file), str(data)])
    assert (1, True) == (done.exit_code, "[data.format]" in done.stderr), done.output


def test_rules_that_do_not_fit_the_data_end_a_run_before_it_generates(
    small_run: Run, verl: Path, tmp_path: Path
) -> None:
    with pytest.raises(JackfieldError) as caught:  # GSM8K's pattern, alone and as a part of a mixture
        small_run("rules", f"data.train={verl}", "data.prompt_overflow=filter", "reward={name: rules}")
    assert ("reward.first-task", True) == (caught.value.code, "ground_truth_pattern" in str(caught.value.found))
    parts = f"reward=[{{name: rules}}, {{name: function, path: '{verl.parent / 'rewards.py'}:compute_score'}}]"
    with pytest.raises(JackfieldError) as caught:
        small_run("rules", f"data.train={verl}", "data.prompt_overflow=filter", parts)
    assert "reward.first-task" == caught.value.code
    assert not [*tmp_path.glob("rules/samples/*")]


def test_weights_of_sets_hold_over_a_resume(small_run: Run, made: Path, tmp_path: Path) -> None:
    """A run that was cut off and resumed has used the tasks that one in one go uses."""
    lines = (made / "problems.jsonl").read_text().splitlines(keepends=True)
    for name, part in (("often", lines[:5]), ("seldom", lines[5:30])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part))
    sets = [{"path": str(tmp_path / "often.jsonl"), "weight": 3}, {"path": str(tmp_path / "seldom.jsonl"), "weight": 1}]
    own = (
        f"data.train={json.dumps(sets)}",
        "checkpoint.every=1",
        "observe.samples_per_step=16",
    )

    def tasks(name: str) -> list[str]:
        rows = list(map(json.loads, (tmp_path / name / "samples" / "train.jsonl").read_text().splitlines()))
        return [row["tags"]["task"] for row in rows]

    small_run("whole", *own, "schedule.steps=4")
    small_run("parts", *own, "schedule.steps=2")
    small_run("parts", *own, "schedule.steps=4")
    assert tasks("whole") == tasks("parts")
    used = Counter(task.partition(":")[0] for task in tasks("whole"))
    assert {"often": 48, "seldom": 16} == used  # 3 : 1 of 4 steps with 4 groups of 4 rollouts


def test_long_prompts_are_cut_where_the_run_says_so(small_run: Run, verl: Path) -> None:
    notes, reward = Notes(), f"reward={{name: function, path: '{verl.parent / 'rewards.py'}:length'}}"
    cuts = ("data.prompt_overflow=truncate_left", "data.max_prompt_tokens=10")
    _, lines = small_run("cut", f"data.train={verl}", reward, *cuts, hooks=[notes])
    assert "20 of 20 prompts have more than 10 tokens and are cut at their beginning" in notes.found[1]
    assert all(line["agent/prompt_tokens_cut/mean"] > 0 for line in lines if line["kind"] == "step")


def test_explain_says_what_is_recognised(verl: Path, made: Path) -> None:
    settings = [f"data.train={verl}", f"data.eval={made / 'held_out.jsonl'}", f"model.path={made / 'model'}"]
    shown = CliRunner().invoke(main, ["config", "explain", str(QUICKSTART / "grpo.yaml"), *settings])
    assert 0 == shown.exit_code, shown.output
    assert f"train tasks: {verl} has verl's prompts" in shown.output
    assert "eval tasks: " in shown.output


def test_without_exploration_the_reward_is_tried_on_a_task_of_the_evaluation(small_run: Run, tmp_path: Path) -> None:
    """A preference has no ground truth, and no reward scores it."""
    pairs, wrong = tmp_path / "pairs.jsonl", tmp_path / "wrong.jsonl"
    pairs.write_text(json.dumps({"prompt": "1 + 2 =", "chosen": "3", "rejected": "4"}) + "\n")
    wrong.write_text(json.dumps({"question": "1 + 2 =", "answer": " "}) + "\n")
    own = (f"data.train={pairs}", "algorithm.name=dpo", "data.groups_per_batch=1", "evaluation.every=3")
    _, lines = small_run("pairs", *own, file="warmup.yaml")
    assert "evaluation" in {line["kind"] for line in lines}
    with pytest.raises(JackfieldError) as caught:
        small_run("wrong", *own, f"data.eval={wrong}", file="warmup.yaml")
    assert "reward.first-task" == caught.value.code
