"""Files of raw records, and what the formatter makes of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from jackfield.cli import main
from jackfield_formatter import FormatReport, FormatSettings, format_file

Records = Sequence[Mapping[str, Any]]
Write = Callable[..., Path]
Form = Callable[..., tuple[FormatReport, list[dict[str, Any]]]]


def lines_of(file: Path) -> list[dict[str, Any]]:
    """Read JSON lines."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def cli(*words: object) -> Result:
    """Run `jackfield data format`."""
    return CliRunner().invoke(main, ["data", "format", *map(str, words)])


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write records as JSON lines."""

    def do(records: Sequence[Any], name: str = "raw.jsonl") -> Path:
        file = tmp_path / name
        file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
        return file

    return do


@pytest.fixture
def form(tmp_path: Path, write: Write) -> Form:
    """Format records, or a file, with settings; returns the report and the lines."""

    def do(
        source: Records | Path, into: str, *, share: float = 0.1, **settings: Any
    ) -> tuple[FormatReport, list[dict[str, Any]]]:
        file = source if isinstance(source, Path) else write(source)
        out = tmp_path / "out.jsonl"
        given = FormatSettings(into=into, **settings)
        report = format_file(file, out, given, maximum_set_aside=share, replaces=True)
        return report, lines_of(out)

    return do
