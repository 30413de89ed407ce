"""Where records come from: JSONL files, read where needed, or a list in memory."""

from __future__ import annotations

import array
import codecs
import json
import math
import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import xxhash

from jackfield.errors import DataError

#: Lines in the first so many bytes of a file are parsed when the file is opened, later ones when they are used.
CHECKED_BYTES = 64 * 2**20
LINE_BYTES = 16 * 2**20  #: of the longest line


class Source:
    """Records of one origin."""

    name: str  #: in default ids and as default data source
    place: str  #: in errors
    digest: str
    checked: int  #: how many records are checked at the beginning

    def __len__(self) -> int:
        raise NotImplementedError

    def line(self, index: int) -> int:
        """The line of a record, from 1."""
        raise NotImplementedError

    def record(self, index: int) -> Any:
        """A parsed record."""
        raise NotImplementedError


class Records(Source):
    def __init__(self, records: list[Any], name: str) -> None:
        self._records = records
        self.name = self.place = name
        self.checked = len(records)
        text = json.dumps(records, sort_keys=True, ensure_ascii=False)
        self.digest = xxhash.xxh3_128_hexdigest(text.encode())

    def __len__(self) -> int:
        return len(self._records)

    def line(self, index: int) -> int:
        return index + 1

    def record(self, index: int) -> Any:
        return self._records[index]


class JsonLines(Source):
    """A JSONL file: 16 bytes of memory per record, one ``pread`` per access."""

    def __init__(self, path: Path, name: str) -> None:
        if not path.is_file():
            raise DataError(
                "the task file does not exist",
                code="data.missing",
                where=str(path),
                expected="a JSONL file",
                found="a folder" if path.is_dir() else "nothing",
                fix=f"check the path; the working folder is {Path.cwd()}",
            )
        self.name = name
        self.place = str(path)
        self._offsets = array.array("Q")
        self._lines = array.array("Q")
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._scan()

    def _scan(self) -> None:
        content = xxhash.xxh3_128()
        offset = 0
        self.checked = 0
        with open(self._file, "rb", closefd=False) as file:
            for number, line in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
                self._check_line(line, number)
                content.update(line)
                if line.strip():
                    self._offsets.append(offset)
                    self._lines.append(number)
                    self.checked += offset < CHECKED_BYTES
                offset += len(line)
        self._end = offset
        self.digest = content.hexdigest()

    def _check_line(self, line: bytes, number: int) -> None:
        """Refuse what would otherwise be read into memory, or be cut in two, before it can be parsed."""
        where = f"{self.place}:{number}"
        if len(line) > LINE_BYTES:
            raise malformed(
                "a line is too long", where, f"at most {LINE_BYTES >> 20} MiB", f"more than {LINE_BYTES} bytes"
            )
        if number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise malformed("the file is not UTF-8", where, "UTF-8", "a byte-order mark of UTF-16", "save it as UTF-8")

    def __len__(self) -> int:
        return len(self._offsets)

    def line(self, index: int) -> int:
        return self._lines[index]

    def record(self, index: int) -> Any:
        start = self._offsets[index]
        end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
        text = os.pread(self._file, end - start, start)
        try:
            return _parsed(text)
        except (ValueError, RecursionError) as error:  # UnicodeError is a ValueError
            where, found = f"{self.place}:{self.line(index)}", f"{type(error).__name__}: {error}"
            raise malformed("a line is not JSON", where, "a JSON object in UTF-8", found[:300]) from None


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


def names(paths: Sequence[Path]) -> list[str]:
    """Return the files' stems, with a number where two are equal."""
    names: list[str] = []
    for path in paths:
        stem, count = path.stem, 1
        while stem in names:
            count += 1
            stem = f"{path.stem}~{count}"
        names.append(stem)
    return names


def malformed(message: str, where: str, expected: str, found: str, fix: str | None = None) -> DataError:
    fix = fix or "correct the line, or leave it out"
    return DataError(message, code="data.malformed", where=where, expected=expected, found=found, fix=fix)
