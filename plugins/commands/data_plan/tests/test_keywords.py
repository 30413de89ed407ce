"""Drafts by keywords: what words give, and what is said of those that give nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

from jackfield.config import RunConfig
from jackfield.plugins.registry import Registry, installed
from jackfield.settings import structure
from jackfield_data_plan.catalogue import catalogue
from jackfield_data_plan.keywords import Draft, drafted
from jackfield_data_plan.sources import Source, open_source

pytestmark = pytest.mark.timeout(120)

EASY = {"name": "priority", "weights": {"difficulty": -1.0}}
EXACT = {"name": "exact_duplicates", "column": "prompt"}
HARD = {"name": "priority", "weights": {"difficulty": 1.0}}
RULES = {"name": "difficulty_rules"}


def length(unit: str = "words", column: str = "prompt", **bounds: int) -> dict[str, Any]:
    return {"name": "length", "column": column, "unit": unit, **bounds}


@pytest.fixture
def source(data: Path) -> Source:
    config = structure(RunConfig, {"model": {"path": ""}, "data": {"train": str(data)}})
    return open_source(config, 20)


def draft(words: str, source: Source, registry: Registry | None = None) -> Draft:
    found = registry or installed()
    return drafted(words, catalogue(found, source.names), source, found)


@pytest.mark.parametrize(
    ("words", "tasks"),
    [
        ("compute difficulty for these maths problems, easy first", [RULES, EASY]),
        ("hard first", [RULES, HARD]),
        ("sort from easy to hard", [RULES, EASY]),
        ("order by decreasing difficulty", [RULES, HARD]),
        ("difficult ones last", [RULES, EASY]),
        ("the 10 hardest", [RULES, {**HARD, "limit": 10}]),
        ("easy first, keep only 25 rows", [RULES, {**EASY, "limit": 25}]),
        ("remove duplicates", [EXACT]),
        ("deduplicate the answers", [{"name": "exact_duplicates", "column": "answer"}]),
        ("no near-duplicates", [{"name": "near_duplicates", "column": "prompt"}]),
        ("drop problems that are too similar", [{"name": "near_duplicates", "column": "prompt"}]),
        ("at most 200 words", [length(maximum=200)]),
        ("shorter than 200 words", [length(maximum=199)]),
        ("remove problems longer than 200 words", [length(maximum=200)]),
        ("remove duplicates and keep at most 200 words", [length(maximum=200), EXACT]),
        ("drop prompts with fewer than 5 words", [length(minimum=5)]),
        ("without duplicates and at most 9 words", [length(maximum=9), EXACT]),
        (
            "filter out anything longer than 1,500 characters or shorter than 10 characters",
            [length("characters", minimum=10, maximum=1500)],
        ),
        (
            "at most 50 words, and answers under 300 characters",
            [length(maximum=50), length("characters", "answer", maximum=299)],
        ),
        ("start with simple problems and get harder", [RULES, EASY]),
        ("dedupe, drop long prompts (over 2000 chars)", [length("characters", maximum=2000), EXACT]),
        ("at least 5 words and no more than 1,000 words", [length(minimum=5, maximum=1000)]),
        ("between 10 and 300 characters", [length("characters", minimum=10, maximum=300)]),
        ("answers of at most 50 characters", [length("characters", "answer", maximum=50)]),
        ('without "Problem 3" or "cat"', [{"name": "words", "column": "prompt", "words": ["problem 3", "cat"]}]),
        (
            "easy first; without duplicates; at most 30 words",
            [length(maximum=30), EXACT, RULES, EASY],
        ),
    ],
)
def test_words_give_operators(words: str, tasks: list[Any], source: Source) -> None:
    found = draft(words, source)
    assert tasks == [*found.tasks]
    assert [] == [*found.not_understood]


def test_words_that_give_nothing_are_named(source: Source) -> None:
    found = draft("easy first, and sparkling ones that are not too long, at most 100 tokens", source)
    assert ["sparkling"] == [*found.not_understood]
    assert 2 == sum("too long" in note or "tokens" in note for note in found.notes)
    assert {"easy first": "priority"}.items() <= found.used.items()


def test_words_that_contradict_each_other_are_named(source: Source) -> None:
    found = draft("easy first, hard first, at most 5 words, at most 9 words", source)
    assert [length(maximum=5)] == [task for task in found.tasks if task["name"] == "length"]
    assert any("at most 9 words" in note for note in found.notes)
    assert any("easy" in note and "hard" in note for note in found.notes)


def test_a_difficulty_alone_orders_nothing_and_says_so(source: Source) -> None:
    found = draft("compute the difficulty", source)
    assert [RULES] == [*found.tasks]
    assert any("easy first" in note for note in found.notes)


def test_an_operator_that_is_not_installed_is_named_with_its_package(source: Source) -> None:
    few = Registry(tuple(record for record in installed().records() if record.name != "near_duplicates"))
    found = draft("easy first, without near duplicates", source, few)
    assert [RULES, EASY] == [*found.tasks]
    assert any("near_duplicates" in note and "pip install jackfield-operator-basic" in note for note in found.notes)


def test_columns_that_are_not_there_are_named(source: Source) -> None:
    found = draft("easy first, responses of at most 50 words, at most 3 problems per colour", source)
    assert [RULES, EASY] == [*found.tasks]
    assert any("column response" in note for note in found.notes)
    assert any("column colour" in note for note in found.notes)


def test_without_answers_difficulty_looks_at_the_problem_alone(tmp_path: Path) -> None:
    file = tmp_path / "asked.jsonl"
    file.write_text('{"question": "What is 2 + 3?"}\n')
    source = open_source(structure(RunConfig, {"model": {"path": ""}, "data": {"train": str(file)}}), 20)
    assert [{**RULES, "answer": None}, EASY] == [*draft("easy first", source).tasks]


def test_a_draft_says_that_it_is_one_and_shows_yaml_and_dry_run(data: Path, command: Callable[..., Result]) -> None:
    found = command("plan", "difficulty, easy first, without duplicates, sparkling", "--data", data)
    assert 0 == found.exit_code, found.output
    assert found.stdout.startswith("This is a draft by keywords: no model was asked")
    assert "not understood: sparkling" in found.stdout
    section = found.stdout[found.stdout.index("data:\n") : found.stdout.index("\nDry run")]
    tasks = [EXACT, RULES, EASY]
    assert {"data": {"pipeline": {"tasks": tasks}}} == yaml.safe_load(section)
    assert "Dry run on 20 rows:\n1. exact_duplicates (deduplicator): 20 → 19 rows, 1 removed" in found.stdout
    assert "maths:20 removed: the same as maths:10" in found.stdout


def test_nothing_that_is_understood_is_an_error(data: Path, error_of: Callable[..., Any]) -> None:
    assert "data.plan" == error_of("plan", "sparkling and blue", "--data", data)["code"]


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ([], "config.missing-key"),
        (["--data", "a.jsonl", "--config", "b.yaml"], "config.missing-key"),
        (["--data", "none.jsonl"], "data.missing"),
        (["--data", "maths.jsonl", "--model", "m"], "config.missing-key"),
        (["--data", "maths.jsonl", "--no-samples"], "config.invalid-value"),
    ],
)
def test_options_that_do_not_fit(data: Path, options: list[str], code: str, error_of: Callable[..., Any]) -> None:
    assert code == error_of("plan", "easy first", *options)["code"]


def test_a_plan_is_written_once_and_runs(
    data: Path, command: Callable[..., Result], json_of: Callable[..., Any]
) -> None:
    made = json_of("plan", "easy first, at most 20 words", "--data", data, "--write", "plan.yaml")
    assert ("keywords", "plan.yaml") == (made["planner"], made["written"])
    again = command("plan", "easy first", "--data", data, "--write", "plan.yaml")
    assert (1, True) == (again.exit_code, "config.invalid-value" in again.stderr)
    assert made["tasks"] == yaml.safe_load(Path("plan.yaml").read_text())["data"]["pipeline"]["tasks"]
    program = [sys.executable, "-m", "jackfield", "data", "run", "plan.yaml", "folder=out", "--json"]
    done = json.loads(subprocess.run(program, check=True, capture_output=True, timeout=60).stdout)
    rows = [json.loads(line) for line in Path(done["rows"]).read_text().splitlines()]
    assert 20 < len(rows) < 40
    assert sorted(row["difficulty"] for row in rows) == [row["difficulty"] for row in rows]


def test_a_run_of_a_file_with_the_plan_in_it(data: Path, json_of: Callable[..., Any]) -> None:
    Path("run.yaml").write_text(f"model: {{path: ''}}\nseed: 7\ndata: {{train: {data}, groups_per_batch: 2}}\n")
    json_of("plan", "easy first", "--config", "run.yaml", "--write", "planned.yaml")
    written = yaml.safe_load(Path("planned.yaml").read_text())
    assert (7, 2) == (written["seed"], written["data"]["groups_per_batch"])
    assert [RULES, EASY] == written["data"]["pipeline"]["tasks"]


def test_a_difficulty_that_the_data_have_is_used(tmp_path: Path, json_of: Callable[..., Any]) -> None:
    file = tmp_path / "scored.jsonl"
    file.write_text("".join(json.dumps({"question": "Why?", "difficulty": n}) + "\n" for n in (3, 1, 2)))
    made = json_of("plan", "difficulty, easy first", "--data", file)
    assert [EASY] == made["tasks"]
    assert any("column difficulty" in note for note in made["notes"])


def test_rows_that_have_passed_a_pipeline_can_pass_it_again(tmp_path: Path, json_of: Callable[..., Any]) -> None:
    file = tmp_path / "passed.jsonl"
    file.write_text(json.dumps({"question": "Why?", "prompt_words": 1}) + "\n")
    (stage,) = json_of("plan", "at most 5 words", "--data", file)["trial"]["stages"]
    assert 1 == stage["kept"]
