"""Rounds of cleaning: plan, run, look, tighten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result

pytestmark = pytest.mark.timeout(180)
Json = Callable[..., Any]


def test_thresholds_are_tightened_until_few_rows_are_left(data: Path, json_of: Json) -> None:
    words = "without duplicates, at most 25 words"
    found = json_of("clean", words, "--data", data, "--folder", "out", "--at-most", 20, "--write", "clean.yaml")
    rows = [each["rows"] for each in found["rounds"]]
    assert (True, "the objective is met") == (found["met"], found["ended"])
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 20 >= rows[-1] > 0
    assert any("length.maximum: 25" in change for change in found["rounds"][1]["changes"])
    tasks = yaml.safe_load(Path("clean.yaml").read_text())["data"]["pipeline"]["tasks"]
    assert found["rounds"][-1]["tasks"] == tasks
    assert ["length", "exact_duplicates"] == [task["name"] for task in tasks]


def test_an_objective_that_cannot_be_met_is_no_success(data: Path, command: Callable[..., Result]) -> None:
    options = ("--data", data, "--folder", "out", "--at-most", 5, "--json")
    found = command("clean", "without duplicates", *options)
    made = json.loads(found.stdout)
    assert (1, False, "no threshold can be tightened further") == (found.exit_code, made["met"], made["ended"])
    assert [37] == [each["rows"] for each in made["rounds"]]


def test_without_an_objective_there_is_one_round(data: Path, command: Callable[..., Result]) -> None:
    found = command("clean", "at most 10 words", "--data", data, "--folder", "out")
    assert 0 == found.exit_code, found.output
    assert "1 rounds, " in found.stdout
    assert "no objective was given" in found.stdout


def test_a_folder_is_needed(data: Path, error_of: Json) -> None:
    assert "config.missing-key" == error_of("clean", "at most 10 words", "--data", data)["code"]


def test_a_model_sees_statistics_and_changes_the_pipeline(data: Path, model: Any, json_of: Json) -> None:
    first, second = ([{"name": "length", "unit": "words", "maximum": most}] for most in (25, 9))
    model.script = [first, [{"name": "lenght"}], second, second]
    found = json_of("clean", "short", "--data", data, "--folder", "out", "--rounds", 5, *model.options())
    assert [first, second] == [each["tasks"] for each in found["rounds"]]
    assert ("the model changed nothing more", None) == (found["ended"], found["met"])
    seen = model.asked()
    assert '"prompt_words"' in seen[1]
    assert "did you mean 'length'" in seen[2]
    assert 4 == len(seen)


def test_a_change_that_is_not_valid_is_not_run(data: Path, model: Any, error_of: Json) -> None:
    model.script = [[{"name": "length"}], [{"name": "length", "column": "/etc/passwd"}]]
    error = error_of("clean", "short", "--data", data, "--folder", "out", "--at-most", 5, *model.options())
    assert "data.plan" == error["code"]
    assert ["0-source", "1-length", "1-length-kept"] == sorted(
        each.name.rpartition("-")[0] for each in Path("out").iterdir() if not each.name.startswith(".")
    )


def test_no_row_that_is_left_is_an_error(data: Path, error_of: Json) -> None:
    error = error_of("clean", "at least 900 words", "--data", data, "--folder", "out")
    assert ("data.empty", True) == (error["code"], "looser" in error["fix"])
