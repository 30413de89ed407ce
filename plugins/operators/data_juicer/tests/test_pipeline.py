"""A recipe of Data-Juicer in a pipeline over files and in one over experiences, in an interpreter of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.operator import OperatorContext
from jackfield.cli import main
from jackfield.config import load_config
from jackfield.errors import ConfigError, JackfieldError, OperatorError
from jackfield.plugins.registry import discover
from jackfield_pipelines.experiences import ExperiencePipeline
from jackfield_pipelines.process_operators import ProcessOperator, end_processes
from jackfield_pipelines.row_sets import KEY
from jackfield_pipelines.tasks import pipeline_of, steps_of
from jackfield_testing import data_juicer_python

pytestmark = [pytest.mark.needs("data_juicer"), pytest.mark.timeout(600)]

RECIPE = """
process:
  - clean_email_mapper:
  - whitespace_normalization_mapper:
  - text_length_filter: {min_len: %d}
  - words_num_filter: {min_num: 3}
  - document_deduplicator:
  - topk_specified_field_selector: {field_key: __dj__stats__.num_words, topk: 2}
"""
TASKS = (
    "How many cards are there? Ask ida@example.org.",
    "There were\u2003seven cards, and Dan buys one. How many now?",
    "There were seven cards, and Dan buys one. How many now?",
    "Say ok.",
    "What is left of nine toys?",
)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Any]:
    """``run(minimum)``: the sets of all stages over some tasks."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": text, "answer": "8"}) + "\n" for text in TASKS) + "\n{no JSON\n")

    def do(minimum: int = 10) -> Any:
        (tmp_path / "recipe.yaml").write_text(RECIPE % minimum)
        entry = {
            "name": "data_juicer",
            "interpreter": str(data_juicer_python()),
            "recipe": str(tmp_path / "recipe.yaml"),
        }
        file = tmp_path / "run.yaml"
        file.write_text(
            json.dumps(
                {
                    "folder": str(tmp_path / "run"),
                    "model": {"path": "none"},
                    "data": {"train": str(tasks), "pipeline": {"tasks": [entry]}},
                }
            )
        )
        states = dict[str, bool]()
        sets = pipeline_of(load_config(str(file), []), lambda made, there: states.update({made.folder.name: there}))
        return sets, states

    return do


def test_a_recipe_passes_as_it_is_and_its_lineage_names_each_operator(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets, _ = run()
    last = [*sets[-1].records()]
    assert ["How many cards are there? Ask .", TASKS[2]] == [record["prompt"] for record in last]
    assert {"text_len": len(TASKS[2]), "num_words": 11} == last[1]["__dj__stats__"]
    assert 10 == len(sets), "the source, six operators, and the decisions of three"
    why = {each[KEY]: each["why"] for made in sets for each in made.records("removed.jsonl")}
    assert {
        "tasks:4": "text_length_filter: text_len is 7",
        "tasks:3": "document_deduplicator: the same as tasks:2",
        "tasks:5": "not selected by topk_specified_field_selector",
    } == why
    assert ["tasks:7"] == [each[KEY] for each in sets[0].records("set_aside.jsonl")], "a line that is no JSON"
    assert {"py-data-juicer 1.6.1"} == {made.manifest["operator_version"] for made in sets[1:]}
    with pytest.raises(SystemExit) as ended:
        main(["data", "trace", str(tmp_path / "run"), "tasks:1"])
    assert 0 == ended.value.code
    lines = capsys.readouterr().out.splitlines()
    named = [line.partition("op=")[2].partition(",")[0] for line in lines if "op=" in line]
    wanted = ["clean_email_mapper", "text_length_filter", "words_num_filter", "topk_specified_field_selector"]
    assert wanted == named


def test_another_threshold_finds_the_statistics(run: Callable[..., Any]) -> None:
    run()
    sets, there = run(50)
    computed = [name for name, was_there in there.items() if was_there]
    assert 4 == len(computed), "the source, two mappers and the statistics of the length"
    assert [TASKS[2]] == [record["prompt"] for record in sets[-1].records()]


def test_thresholds_are_tightened_from_the_statistics(
    run: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a filter in a recipe, by its number; what is in the recipe is not written into the run's file."""
    run()
    given, file = "thresholds={min_len: 50}", str(tmp_path / "run.yaml")
    with pytest.raises(SystemExit) as ended:
        main(["data", "tighten", file, "3", given, "--json"])
    assert 0 == ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (4, 2) == (found["kept_before"], found["kept_after"])
    whys = {each["why"].partition(":")[0] for each in found["removed"]}
    assert {"text_length_filter"} == whys
    with pytest.raises(SystemExit) as ended:
        main(["data", "tighten", file, "1", given])
    assert 0 != ended.value.code
    assert "a mapper" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["data", "tighten", file, "3", given, "--write"])
    assert 0 != ended.value.code
    assert "the recipe" in capsys.readouterr().err


def test_what_cannot_be_used_is_refused_by_name_before_the_first_row() -> None:
    cases: list[tuple[dict[str, Any], type[JackfieldError], str]] = [
        ({"op": "token_num_filter"}, OperatorError, "it needs a model (huggingface)"),
        ({"op": "stopwords_filter"}, OperatorError, "it connects to"),
        ({"op": "image_mmpose_mapper"}, OperatorError, "it starts the program python -m pip install openmim"),
        ({"op": "image_deduplicator"}, OperatorError, "it needs the package imagededup"),
        ({"op": "video_split_by_scene_mapper"}, OperatorError, "it starts the program ffmpeg"),
        ({"op": "text_action_filter"}, OperatorError, "it needs a model (spacy)"),
        ({"op": "naive_grouper"}, OperatorError, "it makes one row of many"),
        ({"op": "text_lenght_filter"}, ConfigError, "text_lenght_filter"),
        ({"op": "text_length_filter", "settings": {"min_lenght": 3}}, ConfigError, "min_lenght"),
        ({"op": "words_num_filter", "thresholds": {"lang": "en"}}, ConfigError, "lang"),
        ({"op": "llm_extract_mapper"}, ConfigError, "missing 2 required positional arguments"),
    ]
    shared = {"name": "data_juicer", "interpreter": str(data_juicer_python())}
    steps = steps_of([{**shared, **entry} for entry, _, _ in cases], discover(), "here")
    try:
        for step, (entry, kind, found) in zip(steps, cases, strict=True):
            with pytest.raises(kind) as refused:
                step.record.build(step.settings, OperatorContext(), "here")
            assert found in str(refused.value.found)
            assert entry["op"] in str(refused.value)
    finally:
        end_processes(step.record for step in steps)


def test_the_guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its command runs with its file, but for the environment's folder."""
    monkeypatch.chdir(Path(__file__).parents[4])
    folder = (data_juicer_python() or Path()).parents[1]
    overrides = [f"folder={tmp_path}", f"environments.data_juicer.folder={folder}"]
    with pytest.raises(SystemExit) as ended:
        main(["data", "run", "examples/guides/data_juicer.yaml", *overrides])
    assert 0 == ended.value.code
    lines = capsys.readouterr().out.splitlines()
    assert 8 == len(lines), "the source, four operators, the decisions of two, and the file"
    rows = [json.loads(line) for line in Path(lines[-1]).read_text().splitlines()]
    assert 0 < len(rows) < 12
    assert all(row["__dj__stats__"]["text_len"] >= 15 for row in rows)


def test_experiences_pass_it_and_a_kill_costs_nothing(tmp_path: Path) -> None:
    """A deduplicator forgets nothing when its process dies between two batches."""
    python = str(data_juicer_python())
    entries = [
        {
            "name": "data_juicer",
            "interpreter": python,
            "op": "document_deduplicator",
            "columns": {"text_key": "response"},
        },
        {"name": "data_juicer", "interpreter": python, "op": "text_length_filter", "columns": {"text_key": "response"}},
    ]
    file = tmp_path / "run.yaml"
    settings = {
        "folder": str(tmp_path / "run"),
        "model": {"path": "none"},
        "data": {"pipeline": {"experiences": entries}},
    }
    file.write_text(json.dumps(settings))

    async def run() -> list[Any]:
        context = OperatorContext(target="experiences")
        made = ExperiencePipeline.of_run(load_config(str(file), []), discover(), context)
        operator = made.stages[0].operator
        assert isinstance(operator, ProcessOperator)
        assert operator.owner is made.stages[1].operator.owner, "both share a process"  # type: ignore[attr-defined]
        await made.start()
        first = await made.shape({"a": {"response": "It is seven."}, "b": {"response": "It is seven."}}, 0)
        os.kill(operator.owner.pid or 0, signal.SIGKILL)
        second = await made.shape({"c": {"response": "It is seven."}, "d": {"response": "8"}}, 1)
        await made.close()
        return [dict(first.removed), dict(second.removed), operator.owner.life]

    assert [
        {"b": "data_juicer: document_deduplicator: the same as a"},
        {
            "c": "data_juicer: document_deduplicator: the same as a",
            "d": "data_juicer: text_length_filter: text_len is 1",
        },
        2,
    ] == asyncio.run(run())
