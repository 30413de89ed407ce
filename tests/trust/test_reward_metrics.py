"""What a reward returns beside its score, and what it prints, is kept and shown, or refused: nothing is dropped."""

from __future__ import annotations

import json
import re
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer, Completed

pytestmark = pytest.mark.timeout(180)

REWARD = """
import logging, os, subprocess, sys, warnings

def score(solution_str, extra_info, **_):
    print("on standard output")
    print("on standard error", file=sys.stderr)
    logging.getLogger("mine").warning("by a logger")
    warnings.warn("a warning")
    subprocess.run(["sh", "-c", "echo by a child"], check=True)
    os.write(1, b"by the descriptor\\n")
    return {"score": len(solution_str) % 2, "length": len(solution_str), "short": len(solution_str) < 4}

def loud(solution_str, **_):
    print("x" * 300_000)
    return len(solution_str) % 2

def bad(value):
    return {"score": 1.0, "pages": value}

def nan(**_):
    return bad(float("nan"))

def text(**_):
    return bad("seven")

def overflow(**_):
    raise OverflowError

def several(solution_str, **_):
    if len(solution_str) % 3:
        raise ValueError("no such unit")
    return {}["missing"]
"""

Run = Callable[..., Completed]


@pytest.fixture
def run(jackfield: CommandServer, tmp_path: Path, quickstart_settings: Callable[..., list[str]]) -> Run:
    def run(name: str, function: str, *overrides: str) -> Completed:
        file = tmp_path / "my_reward.py"
        file.write_text(REWARD)
        reward = f"reward={{name: function, path: '{file}:{function}', try_first: false}}"
        return jackfield("run", *quickstart_settings(name, reward, "schedule.max_retries=1", *overrides))

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_metrics_and_prints_of_a_reward(run: Run, tmp_path: Path) -> None:
    """Each sample has its metrics, also after a resume with rows that were scored before it; steps their means."""
    folder = tmp_path / "run"
    given = ["transfer_queue=sql", "schedule.sync_offset=1", "checkpoint.every=1", "evaluation.every=1"]
    given += ["evaluation.tasks=4", "observe.samples_per_step=16"]
    for steps in (1, 3):
        ended = run("run", "score", f"schedule.steps={steps}", *given)
        assert 0 == ended.code, ended.error
        assert "on standard" not in ended.out + ended.error
    told, tables = lines(folder / "metrics.jsonl"), folder / "samples"
    for kind, count, table in (("step", 3, "train"), ("evaluation", 4, "eval")):
        rows = {
            line["step"]: [row for row in lines(tables / f"{table}.jsonl") if row["step"] == line["step"]]
            for line in told
            if line["kind"] == kind
        }
        assert count == len(rows)
        for line in (line for line in told if line["kind"] == kind):
            samples = rows[line["step"]]
            assert (16 if kind == "step" else 4) == len(samples)
            lengths = [row["tags"]["reward/length"] for row in samples]
            assert [row["reward"] for row in samples] == [length % 2 for length in lengths]
            assert line["reward/length/mean"] == pytest.approx(statistics.mean(lengths))
            assert line["reward/short/mean"] == pytest.approx(statistics.mean(length < 4 for length in lengths))
    printed = (folder / "logs" / "reward-0-0.log").read_text()
    scored = printed.count("on standard output\n")
    assert 3 * 16 + 4 * 4 <= scored
    for text in ("on standard error\n", "by a logger\n", "by a child\n", "by the descriptor\n"):
        assert scored == printed.count(text)
    assert "a warning" in printed


def test_output_is_bounded(run: Run, tmp_path: Path) -> None:
    """The newest is kept: a file, and the one before it."""
    ended = run("loud", "loud", "schedule.steps=2")
    assert 0 == ended.code, ended.error
    sizes = {file.name: file.stat().st_size for file in (tmp_path / "loud" / "logs").iterdir()}
    assert {"reward-0-0.log", "reward-0-0.log.1"} == set(sizes)
    assert 5 * 2**20 > max(sizes.values())
    assert 4 * 2**20 < sum(sizes.values())


@pytest.mark.parametrize("function", ["nan", "text"])
def test_a_metric_that_is_no_finite_number_is_refused(run: Run, function: str) -> None:
    ended = run(function, function)
    assert 1 == ended.code
    assert "reward.output" in ended.error
    assert "pages" in ended.error
    assert "Traceback" not in ended.error


def test_an_error_without_text_names_its_line(run: Run, tmp_path: Path) -> None:
    ended = run("overflow", "overflow")
    assert 1 == ended.code
    line = 1 + (tmp_path / "my_reward.py").read_text().splitlines().index("    raise OverflowError")
    first = ended.error.splitlines()[0]
    assert f"× OverflowError ({tmp_path / 'my_reward.py'}:{line})" in first
    assert 1 == ended.error.count("OverflowError (")


def test_a_reward_that_fails_in_several_ways(run: Run) -> None:
    """Each way stands there once, with its count and its line, the most frequent first."""
    ended = run("several", "several", "schedule.max_retries=3")
    assert 1 == ended.code
    found = re.findall(r"(\d+) × (\w+): .* \(.*my_reward.py:\d+\)", ended.error)
    assert {"ValueError", "KeyError"} == {name for _, name in found}, ended.error
    assert 2 == len(found), ended.error
    assert sorted((int(count) for count, _ in found), reverse=True) == [int(count) for count, _ in found]


def test_answers_on_which_the_checker_times_out_train_as_wrong(
    jackfield: CommandServer, tmp_path: Path, made: Path, quickstart_settings: Callable[..., list[str]]
) -> None:
    """They are counted, and no answer is left out, in training or evaluation."""
    model, file = tmp_path / "model", "tokenizer.json"
    shutil.copytree(made / "model", model)
    tokenizer = json.loads((model / file).read_text())
    vocabulary = tokenizer["model"]["vocab"]
    plain = sorted(word for word in vocabulary if not word.startswith("<"))
    tokenizer["model"]["vocab"] = {
        f"$9^{{9^{{9^{{9^{{{number}}}}}}}}}$" if word in plain[::2] else word: number
        for word, number in vocabulary.items()
    }
    (model / file).write_text(json.dumps(tokenizer))
    given = ["reward={name: rules, method: math, seconds: 0.5, incorrect: -1.0}", "data.rollouts_per_group=2"]
    given += [
        "sampling.max_new_tokens=1",
        "evaluation.tasks=2",
        "schedule.steps=1",
        "observe.samples_per_step=16",
        "schedule.max_retries=0",
    ]
    ended = jackfield("run", *quickstart_settings("towers", *given, f"model.path={model}"))
    assert 0 == ended.code, ended.error
    [step] = [line for line in lines(tmp_path / "towers" / "metrics.jsonl") if line["kind"] == "step"]
    rows = lines(tmp_path / "towers" / "samples" / "train.jsonl")
    late = [row for row in rows if row["tags"]["reward/timeout"]]
    assert 8 == len(rows)
    assert 0 < len(late) < 8
    assert {-1.0} == {row["reward"] for row in late}
    assert step["reward/timeout/mean"] == pytest.approx(len(late) / 8)
    assert not (tmp_path / "towers" / "samples" / "failed.jsonl").exists()
