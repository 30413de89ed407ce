"""Settings and recipes, which are read where Data-Juicer is not installed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.errors import ConfigError
from jackfield.plugins.registry import discover
from jackfield.settings import structure
from jackfield_operator_data_juicer.config import DataJuicerConfig

RECIPE = """
project_name: demo
dataset_path: nowhere.jsonl
np: 4
text_keys: {text_keys}
process:
  - whitespace_normalization_mapper:
  - text_length_filter:
      min_len: 20
      max_len: 500
  - document_deduplicator: {{lowercase: true}}
  - random_selector
"""


def stages(**settings: Any) -> list[dict[str, Any]]:
    return structure(DataJuicerConfig, settings).stages()


def recipe(folder: Path, text: str) -> dict[str, Any]:
    file = folder / "recipe.yaml"
    file.write_text(text)
    return {"recipe": str(file)}


def test_thresholds_are_told_from_what_statistics_need() -> None:
    """So another threshold finds the statistics that are there."""
    made = structure(DataJuicerConfig, {"op": "words_num_filter", "settings": {"lang": "en", "min_num": 3}})
    assert ({"lang": "en"}, {"min_num": 3}) == (made.settings, made.thresholds)
    again = structure(DataJuicerConfig, attrs.asdict(made))
    assert made == again


@pytest.mark.parametrize(
    ("texts", "columns"), [("text", {}), ("response", {"text_key": "response"}), ("[answer]", {"text_key": "answer"})]
)
def test_a_recipe_is_one_stage_for_each_operator(tmp_path: Path, texts: str, columns: dict[str, str]) -> None:
    found = stages(**recipe(tmp_path, RECIPE.format(text_keys=texts)))
    assert [
        ("whitespace_normalization_mapper", {}),
        ("text_length_filter", {"min_len": 20, "max_len": 500}),
        ("document_deduplicator", {"lowercase": True}),
        ("random_selector", {}),
    ] == [(stage["op"], stage["settings"]) for stage in found]
    assert [columns] * 4 == [stage["columns"] for stage in found]


def test_the_entry_says_which_column_has_the_text(tmp_path: Path) -> None:
    given = recipe(tmp_path, RECIPE.format(text_keys="answer"))
    assert {"text_key": "response"} == stages(**given, columns={"text_key": "response"})[0]["columns"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("process: []", "has no operators"),
        ("dataset_path: x", "has no operators"),
        ("- text_length_filter", "has no operators"),
        ("process: [3]", "is no operator"),
        ("process: [{a_filter: {}, b_filter: {}}]", "is no operator"),
        ("process: [{a_filter: [1]}]", "is no operator"),
        ("process: [a_filter]\ncustom_operator_paths: [mine.py]", "loads code of its own"),
        ("process: {", "cannot be read"),
        ("process: !!python/name:os.system", "cannot be read"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_refused_with_its_file(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        stages(**recipe(tmp_path, text))
    assert what in refused.value.message
    assert str(tmp_path / "recipe.yaml") in str(refused.value.where)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({}, "op"),
        ({"op": "a_filter", "recipe": "r.yaml"}, "recipe"),
        ({"recipe": "r.yaml", "settings": {"a": 1}}, "recipe"),
    ],
)
def test_one_operator_or_one_recipe_is_named(settings: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError) as refused:
        stages(**settings)
    assert where == refused.value.where


def test_a_missing_recipe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        stages(recipe=str(tmp_path / "none.yaml"))
    assert "config.invalid-value" == refused.value.code


def test_nothing_of_data_juicer_is_imported_for_the_settings() -> None:
    record = discover().resolve("data_juicer", "operator")
    assert DataJuicerConfig is record.settings_class
    assert "data_juicer" not in sys.modules
    assert "jackfield_operator_data_juicer.bridge" not in sys.modules
