"""Statistics of stages, and thresholds from them: what they keep, and that nothing is computed again."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jackfield.config import load_config
from jackfield.errors import DataError
from jackfield.plugins.registry import installed
from jackfield_data_plan.distributions import Columns, reasons
from jackfield_data_plan.thresholds import filter_stage

pytestmark = pytest.mark.timeout(120)
Json = Callable[..., Any]

RUN = """\
# a run with comments
model: {path: ""}   # none
folder: out
data:
  train: maths.jsonl
  pipeline:
    tasks:
      - name: length      # of problems
        unit: words
        maximum: 20  # words

      - {name: words, words: [cat], maximum: 0}
      - {name: difficulty_rules}
# the end
"""


@pytest.fixture
def ran(data: Path, command: Callable[..., Result]) -> Path:
    """A run's file whose stages are there."""
    file = data.with_name("run.yaml")
    file.write_text(RUN)
    done = command("run", file)
    assert 0 == done.exit_code, done.output
    return file


def counts() -> list[int]:
    return [len(json.loads(line)["question"].split()) for line in Path("maths.jsonl").read_text().splitlines()]


def files() -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(Path("out").rglob("*"))}


def test_statistics_of_stages(ran: Path, json_of: Json) -> None:
    found = json_of("statistics", "out")
    assert ["0-source", "1-length", "1-length-kept"] == [each["stage"].rpartition("-")[0] for each in found[:3]]
    computed, kept = found[1:3]
    words = counts()
    column = computed["columns"]["prompt_words"]
    assert (len(words), 0) == (column["count"], column["others"])
    assert statistics.mean(words) == pytest.approx(column["mean"])
    assert (min(words), statistics.median(words), max(words)) == (
        column["minimum"],
        column["quantiles"]["0.5"],
        column["maximum"],
    )
    assert sum(column["histogram"]) == len(words)
    gone = sum(number > 20 for number in words)
    assert (len(words) - gone, gone, {"N words": gone}) == (kept["rows"], kept["removed"], kept["reasons"]["removed"])
    assert {"prompt_words", "difficulty", "prompt_words_found"} == found[-1]["columns"].keys()
    assert found == json_of("statistics", "out/data")


def test_statistics_of_a_file_and_of_one_column(ran: Path, json_of: Json, error_of: Json) -> None:
    (found,) = json_of("statistics", "maths.jsonl", "--column", "question")
    characters = [len(json.loads(line)["question"]) for line in Path("maths.jsonl").read_text().splitlines()]
    assert ("characters", max(characters)) == (
        found["columns"]["question"]["of"],
        found["columns"]["question"]["maximum"],
    )
    error = error_of("statistics", "out", "--column", "dificulty")
    assert ("data.missing", True) == (error["code"], "did you mean 'difficulty'" in error["message"])
    assert "data.missing" == error_of("statistics", "nowhere")["code"]


def test_statistics_as_text(ran: Path, command: Callable[..., Result]) -> None:
    found = command("statistics", "out").stdout
    assert "  prompt_words: 40 rows, mean" in found
    assert "removed: " in found
    assert "█" in found


def test_columns_with_odd_values() -> None:
    columns = Columns()
    for value in (1, True, 2.5, float("nan"), 10**400, None, "text", [1], -(10**400)):
        columns.add({"n": value, "_row": "r"})
    found = columns.distributions()["n"]
    assert (3, 6, 1.0, 2.5, 1.5) == (found.count, found.others, found.minimum, found.maximum, found.mean)


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=30))
def test_any_numbers_have_a_distribution(numbers: list[float]) -> None:
    columns = Columns()
    for number in numbers:
        columns.add({"n": number})
    found = columns.distributions()["n"]
    assert (min(numbers), max(numbers), len(numbers)) == (found.minimum, found.maximum, found.count)
    assert len(numbers) == sum(found.histogram)
    assert len(found.histogram) == len(found.bars())


def test_reasons_with_other_numbers_and_texts_are_one() -> None:
    found = reasons(["12 words", "7 words", "has 'a'", "has 'b c'", "other"])
    assert {"N words": 2, "has '…'": 2, "other": 1} == dict(found)


def test_another_threshold_is_shown_and_nothing_is_computed(ran: Path, json_of: Json) -> None:
    before = files()
    found = json_of("tighten", ran, "length", "maximum=10", "minimum=4")
    words = counts()
    assert sum(1 <= number <= 20 for number in words) == found["kept_before"]
    assert sum(4 <= number <= 10 for number in words) == found["kept_after"]
    assert ({"maximum": 20, "minimum": 1}, {"maximum": 10, "minimum": 4}) == (found["before"], found["after"])
    assert 5 == len(found["removed"])
    for row in found["removed"]:
        number = int(row["row"].partition(":")[2])
        assert f"{words[number - 1]} words" == row["why"]
    assert (before, RUN) == (files(), ran.read_text())


def test_a_looser_threshold_brings_rows_back(ran: Path, json_of: Json) -> None:
    found = json_of("tighten", ran, "1", "maximum=null")
    assert (40, []) == (found["kept_after"], found["removed"])
    assert found["restored"]


@pytest.mark.parametrize("name", ["minimum", "maximum"])
@given(keep=st.floats(0.01, 1.0))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_strictest_threshold_that_keeps_a_share_is_found(ran: Path, name: str, keep: float) -> None:
    words = counts()
    stage = filter_stage(load_config(ran), "length", installed())
    kept = {
        "minimum": lambda bound: sum(bound <= number <= 20 for number in words),
        "maximum": lambda bound: sum(1 <= number <= bound for number in words),
    }[name]
    possible = [bound for bound in range(0, 40) if kept(bound) >= keep * len(words)]
    if not possible:
        with pytest.raises(DataError) as refused:
            stage.found([name], keep)
        assert "data.threshold" == refused.value.code
        return
    assert min(map(kept, possible)) == kept(stage.found([name], keep)[name])


def test_several_thresholds_share_what_is_lost(ran: Path, json_of: Json) -> None:
    run = yaml.safe_load(RUN)
    run["data"]["pipeline"]["tasks"][0]["maximum"] = 99
    ran.write_text(yaml.safe_dump(run))
    assert 1 == json_of("tighten", ran, "length", "maximum=99")["rows"] // 40  # the same statistics
    found = json_of("tighten", ran, "length", "minimum", "maximum", "--keep", "0.7")
    assert 28 <= found["kept_after"] < 40
    assert found["after"]["minimum"] > 1
    assert found["after"]["maximum"] < 32


def test_thresholds_are_written_and_comments_stay(ran: Path, command: Callable[..., Result], json_of: Json) -> None:
    json_of("tighten", ran, "words", "maximum=2", "--write")
    json_of("tighten", ran, "length", "maximum=15", "minimum=3", "--write")
    expected = RUN.replace("maximum: 20  # words", "maximum: 15  # words")
    expected = expected.replace("# of problems\n", "# of problems\n        minimum: 3\n").replace(
        "maximum: 0}", "maximum: 2}"
    )
    assert expected == ran.read_text()
    stages = json.loads(command("run", ran, "--json").stdout)["stages"]
    assert "there" == stages[1]["state"]
    assert sum(3 <= number <= 15 for number in counts()) == stages[2]["rows"]


def test_a_setting_that_is_missing_in_one_line_is_added(ran: Path, json_of: Json) -> None:
    ran.write_text(RUN.replace(", maximum: 0}", "}"))
    json_of("tighten", ran, "words", "maximum=1", "--write")
    assert RUN.replace("maximum: 0}", "maximum: 1}") == ran.read_text()


def test_an_alias_that_would_change_more_is_refused(ran: Path, error_of: Json) -> None:
    text = RUN.replace("- {name: words, words: [cat], maximum: 0}", "- &w {name: words, words: [cat], maximum: 0}")
    text = text.replace("- {name: difficulty_rules}", "- {name: difficulty_rules}\n    experiences: [*w]")
    ran.write_text(text)
    assert "config.invalid-value" == error_of("tighten", ran, "words", "maximum=1", "--write")["code"]
    assert text == ran.read_text()


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["lenght", "maximum=3"], "config.invalid-value"),
        (["difficulty_rules", "maximum=3"], "config.invalid-value"),
        (["length", "unit=words"], "config.invalid-value"),
        (["length", "maximum=-3"], "config.invalid-value"),
        (["length", "maximum=many"], "config.wrong-type"),
        (["length", "minimum=30"], "config.invalid-value"),
        (["length", "maximum"], "config.override"),
        (["length", "maximum=3", "--keep", "0.5"], "config.override"),
        (["length", "maximum={"], "config.override"),
        (["length"], "config.missing-key"),
        (["length", "--keep", "0.5"], "data.threshold"),
        (["length", "minimum", "--keep", "1.0"], "data.threshold"),
    ],
)
def test_thresholds_that_cannot_be(words: list[str], code: str, ran: Path, error_of: Json) -> None:
    assert code == error_of("tighten", ran, *words)["code"]
    assert RUN == ran.read_text()


def test_without_statistics_there_is_nothing_to_tighten(
    data: Path, error_of: Json, command: Callable[..., Result]
) -> None:
    file = data.with_name("run.yaml")
    file.write_text(RUN)
    assert "data.missing" == error_of("tighten", file, "length", "maximum=3")["code"]
    assert 0 == command("run", file).exit_code
    file.write_text(RUN.replace("unit: words", "unit: characters"))
    assert "data.missing" == error_of("tighten", file, "length", "maximum=3")["code"]


def test_statistics_follow_the_thresholds_before(ran: Path, json_of: Json, command: Callable[..., Result]) -> None:
    """The second filter's statistics are those of the rows that the first one keeps, as the file is now."""
    assert json_of("tighten", ran, "words", "maximum=1")["rows"] == sum(number <= 20 for number in counts())
    ran.write_text(RUN.replace("maximum: 20", "maximum: 12"))
    assert 0 == command("run", ran).exit_code
    assert json_of("tighten", ran, "words", "maximum=1")["rows"] == sum(number <= 12 for number in counts())
