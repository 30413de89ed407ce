"""Writes the records of any format as JSON lines into a temporary file."""

from __future__ import annotations

import codecs
import contextlib
import itertools
import tempfile
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from jackfield.config.data import DataSet
from jackfield.data.formats import naming, refusal
from jackfield.errors import PluginError
from jackfield_datasets.files import READERS, Row, rows_of_folder, suffix_of
from jackfield_datasets.hub import looks_like_a_name, rows_of_hub

_ROW_SET = ("manifest.json", "rows.jsonl")  #: files of a set that a data pipeline has left
FIRST = 8  #: so many first records say what all are


def open_lines(given: DataSet, limit: int | None = None) -> BinaryIO:
    """Return a file of JSON lines with the first ``limit`` records of a set; line n is its row n, from 1 on.

    The file is in ``TMPDIR``, has no name there and ends with the process. Errors are ``data.missing``,
    ``data.malformed``, with file and row, and ``plugin.requirement``.
    """
    if suffix_of(given.path) == ".jsonl" and limit is None and Path(given.path).is_file():
        _refuse(given, "config", "split")
        return Path(given.path).open("rb")  # it is what this function makes
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryFile(prefix="jackfield-"))
        for number, row in enumerate(itertools.islice(rows_of(given), limit), 1):
            with naming(f"{given.path}:{number}"):
                made.write(_encoded(row))
        made.flush()
        stack.pop_all()
        return made


def first_records(opened: BinaryIO) -> list[Any]:
    """Return the first records, of which the file has one on each line; those that are no JSON are left out."""
    found = []
    opened.seek(0)
    for line in itertools.islice(filter(bytes.strip, opened), FIRST):
        with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
            found.append(msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8)))
    return found


def _encoded(row: Row) -> bytes:
    if isinstance(row, bytes):
        return row if row.endswith(b"\n") else row + b"\n"
    try:
        return msgspec.json.encode(row) + b"\n"
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
        expected = "texts, numbers, lists and objects"
        raise refusal("a record has a value that JSON cannot hold", expected, str(error)[:200]) from error


def rows_of(given: DataSet) -> Iterator[Row]:
    """Yield the records of a set: objects, or lines of JSON as they are."""
    path, suffix = Path(given.path), suffix_of(given.path)
    if not path.exists() and ":" in given.path and not given.split:
        name, _, split = given.path.partition(":")
        if Path(name).is_dir() or looks_like_a_name(name):
            return rows_of(DataSet(path=name, split=split, config=given.config))
    if path.is_dir() and all((path / name).is_file() for name in _ROW_SET):
        _refuse(given, "config", "split")
        return READERS[".jsonl"](_rows_of_set(path))
    if path.is_dir():
        _refuse(given, "config")
        return rows_of_folder(path, given.split)
    if path.is_file() and suffix in READERS:
        _refuse(given, "config", "split")
        return READERS[suffix](path)
    if not path.exists() and suffix not in READERS and looks_like_a_name(given.path):
        return rows_of_hub(given.path, given.config, given.split)
    expected = f"a file ending with {', '.join(READERS)}, a folder of save_to_disk, or org/name of the Hub"
    found, fix = "nothing", f"check the path from {Path.cwd()}"
    if path.exists():
        found, fix = "a file with another ending", "convert it; if it has one JSON object per line, name it .jsonl"
    raise refusal("the set of tasks cannot be read", expected, found, fix, "data.missing", given.path)


def _rows_of_set(folder: Path) -> Path:
    """Return the file with the rows of a set that a data pipeline has left, in its newest version."""
    if find_spec("jackfield_pipelines") is None:
        fix = "pip install jackfield-pipelines"
        raise PluginError("a set of a data pipeline needs jackfield-pipelines", where=str(folder), fix=fix)
    found: Path = import_module("jackfield_pipelines.versions").rows_of(folder)
    return found


def _refuse(given: DataSet, *names: str) -> None:
    for name in names:
        if (value := getattr(given, name)) is not None:
            what, expected = f"{name} has no effect on this set", f"no {name}: it is for sets of the Hub"
            raise refusal(what, expected, str(value), f"leave {name} out", where=given.path)
