"""Models and shapes of another package, which is laid out as pip leaves it."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from jackfield.errors import PluginError
from jackfield_formatter import shapes

from .conftest import Write, cli, lines_of

PACKAGE = {
    "own_models/__init__.py": """
        from typing import ClassVar

        import attrs

        from jackfield_formatter import DataModel, Example, Shape


        @attrs.frozen(kw_only=True)
        class CardRow(DataModel):
            schema: ClassVar[str] = "own.card"
            version: ClassVar[int] = 3

            front: str
            back: str

            @classmethod
            def of_example(cls, example, context):
                return [{"front": example.prompt[-1]["content"], "back": example.response}]


        class Flashcards(Shape):
            name = "flashcards"

            def fits(self, first):
                return {"front", "back"} <= first.keys()

            def example(self, record):
                asked = ({"role": "user", "content": record["front"]},)
                return Example(prompt=asked, response=record["back"], ground_truth=record["back"])


        NOTHING = 1
    """,
    "own_models-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: own-models\nVersion: 1.0\n",
    "own_models-1.0.dist-info/entry_points.txt": """
        [jackfield.data_models]
        card = own_models:CardRow
        absent = own_models:Absent
        nothing = own_models:NOTHING

        [jackfield.data_shapes]
        flashcards = own_models:Flashcards
    """,
}


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package."""
    for name, text in PACKAGE.items():
        (tmp_path / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "site" / name).write_text(dedent(text))
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    shapes.shapes.cache_clear()
    yield
    shapes.shapes.cache_clear()


CARDS = [{"front": f"{n} + 1", "back": str(n + 1)} for n in range(3)]


def test_a_shape_of_another_package_is_recognised(write: Write, tmp_path: Path) -> None:
    done = cli(write(CARDS), tmp_path / "out.jsonl", "--as", "task", "--json")
    assert 0 == done.exit_code, done.output
    assert "flashcards" == json.loads(done.output)["shape"]
    lines = lines_of(tmp_path / "out.jsonl")
    assert [("0 + 1", "1"), ("1 + 1", "2"), ("2 + 1", "3")] == [
        (each["prompt"], each["ground_truth"]) for each in lines
    ]


def test_a_model_of_another_package_is_written(write: Write, tmp_path: Path) -> None:
    """From what shapes find, and by a mapping."""
    answers = write([{"prompt": "a", "completion": "b"}], "answers.jsonl")
    assert 0 == cli(answers, tmp_path / "one.jsonl", "--as", "card").exit_code
    assert [{"_schema": "own.card/3", "front": "a", "back": "b"}] == lines_of(tmp_path / "one.jsonl")
    mapping = ("--map", "front=x", "--map", "back=y")
    done = cli(write([{"x": "1", "y": "2"}]), tmp_path / "two.jsonl", "--as", "card", *mapping)
    assert 0 == done.exit_code, done.output
    assert [{"_schema": "own.card/3", "front": "1", "back": "2"}] == lines_of(tmp_path / "two.jsonl")


@pytest.mark.parametrize("name", ["absent", "nothing"])
def test_entry_points_that_name_no_model(write: Write, tmp_path: Path, name: str) -> None:
    """The error names the distribution and what the entry point says; other models are not affected."""
    done = cli(write(CARDS), tmp_path / "out.jsonl", "--as", name)
    assert 1 == done.exit_code
    assert f"jackfield.data_models, {name} = own_models:" in done.output
    assert "of own-models" in done.output
    assert f"[{PluginError.default_code}]" in done.output
    assert 0 == cli(write(CARDS), tmp_path / "out.jsonl", "--as", "task").exit_code
