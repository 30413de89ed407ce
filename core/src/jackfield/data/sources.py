"""JSONL files whose records are read where needed."""

from __future__ import annotations

import array
import codecs
import contextlib
import json
import math
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from jackfield.errors import DataError

#: Lines in the first so many bytes of a file are parsed when the file is opened, later ones when they are used.
CHECKED_BYTES = 64 * 2**20
LINE_BYTES = 16 * 2**20  #: of the longest line


class JsonLines:
    """A JSONL file: 16 bytes of memory per record, one ``pread`` per access. Lines may be blank.

    Raises:
        DataError: ``data.missing``, or ``data.malformed`` where a line is too long to be parsed.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise DataError(
                "the task file does not exist",
                code="data.missing",
                where=str(path),
                expected="a JSONL file",
                found="a folder" if path.is_dir() else "nothing",
                fix=f"check the path; the working folder is {Path.cwd()}",
            )
        self.path = path
        self.checked = 0  #: how many records are in the first part of the file
        self._offsets, self._lines = array.array("Q"), array.array("Q")
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self.digest = self._scan()  #: xxh3_128 of the bytes

    def _scan(self) -> str:
        content, self._end = xxhash.xxh3_128(), 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                with naming(f"{self.path}:{number}"):
                    _check_line(line, number)
                content.update(line)
                if line.strip():
                    self._offsets.append(self._end)
                    self._lines.append(number)
                    self.checked += self._end < CHECKED_BYTES
                self._end += len(line)
        return content.hexdigest()

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, index: int) -> int:
        """Return the line of a record, from 1."""
        return self._lines[index]

    def record(self, index: int) -> Any:
        """Parse a record."""
        start = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
        text = os.pread(self._file, end - start, start)
        try:
            return _parsed(text)
        except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
            found = f"{type(error).__name__}: {error}"[:300]
            raise malformed("a line is not JSON", "a JSON object in UTF-8", found) from None


def _check_line(line: bytes, number: int) -> None:
    """Refuse what would otherwise be read into memory, or be cut in two, before it can be parsed."""
    if len(line) > LINE_BYTES:
        raise malformed("a line is too long", f"at most {LINE_BYTES >> 20} MiB", f"more than {LINE_BYTES} bytes")
    if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise malformed("the file is not UTF-8", "UTF-8", "a byte-order mark of UTF-16", "save it as UTF-8")


def _parsed(text: bytes) -> Any:
    """Parse a line that any other process, too, can read: finite numbers, integers of 64 bits, texts in UTF-8.

    Raises:
        ValueError, RecursionError: it is none.
    """
    value = json.loads(text.decode("utf-8-sig"), parse_constant=_finite, parse_float=_finite, parse_int=_integer)
    if rb"\ud" in text.lower():
        json.dumps(value, ensure_ascii=False).encode()  # refuses half of a surrogate pair
    return value


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**64:
        raise ValueError(f"the integer {text[:40]} does not fit into 64 bits; write it as a text")
    return number


def malformed(message: str, expected: str, found: str, fix: str = "correct the line, or leave it out") -> DataError:
    """Return the error of a record that is refused; :func:`naming` adds its place."""
    return DataError(message, code="data.malformed", expected=expected, found=found, fix=fix)


@contextlib.contextmanager
def naming(place: str) -> Iterator[None]:
    """Name the place of a record, ``file:line``, in an error that is raised about it."""
    try:
        yield
    except DataError as error:
        error.where = place if error.where is None else f"{place} ({error.where})"
        raise
