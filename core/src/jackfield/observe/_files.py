"""Files that stay whole: appends that arrive whole or not at all, replacement in one move, strict JSON."""

from __future__ import annotations

import contextlib
import json
import math
import numbers
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["AppendFile", "cut_after", "encode", "number", "read_lines", "replace", "strict"]

# Some readers end a line at these characters, too, which JSON allows inside a string.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class AppendFile:
    """An append-only file in which each append is whole or absent, also when the process is killed or a disk fills.

    Args:
        path: opened where it ends; made when it is not there.
        tail: bytes that end the file after every append (the bracket that closes a JSON array). The file must
            end with them already when it is not empty.
    """

    def __init__(self, path: Path, tail: bytes = b"") -> None:
        path.touch()
        # Unbuffered: one append is one write of the operating system, so that a kill leaves none half done.
        self._file = path.open("r+b", buffering=0)
        self._tail = tail
        self._end = max(path.stat().st_size - len(tail), 0)

    def append(self, data: bytes) -> None:
        """Write ``data`` at the end; when that fails the file is as before.

        Raises:
            OSError: when the data could not be written.
        """
        try:
            self._write(data + self._tail)
        except BaseException:
            with contextlib.suppress(OSError):
                self._file.truncate(self._end)
                self._write(self._tail)
            raise
        self._end += len(data)

    def close(self) -> None:
        """Close the file; a second time does nothing."""
        self._file.close()

    def _write(self, data: bytes) -> None:
        self._file.seek(self._end)
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]


def replace(path: Path, chunks: Iterable[bytes]) -> None:
    """Replace the file at ``path`` in one move by one that holds ``chunks``; readers see the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(chunks)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def encode(value: Mapping[str, Any]) -> bytes:
    """``value`` as one line of strict JSON in UTF-8, without the line's end.

    Raises:
        ValueError: for NaN and infinities; see :func:`strict`.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return text.encode("utf-8", errors="backslashreplace")  # a lone surrogate becomes its JSON escape


def number(value: Any) -> float | int:
    """A metric's value as a plain number; zero-dimensional arrays and tensors are numbers, too."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def strict(value: Any, not_finite: list[str], path: str = "") -> Any:
    """``value`` in JSON's own types: not-finite numbers are None and their paths are appended to ``not_finite``."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Real):
        plain = number(value)
        if math.isfinite(plain):
            return plain
        not_finite.append(path)
        return None
    if isinstance(value, Mapping):
        return {str(key): strict(item, not_finite, f"{path}.{key}".lstrip(".")) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [strict(item, not_finite, f"{path}[{index}]") for index, item in enumerate(value)]
    return str(value)


def read_lines(path: Path, last_step: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file, those of steps after ``last_step`` left out.

    A file that is not there has none. A line that a kill or another program tore is skipped.
    """
    for _, line in _lines(path, last_step):
        yield line


def cut_after(path: Path, last_step: int) -> None:
    """Drop a JSON-lines file's lines of steps after ``last_step``, and torn lines, in one move.

    A run that begins at step 0 has restored nothing, so it keeps nothing.
    """
    if path.exists():
        replace(path, (raw for raw, _ in _lines(path, last_step) if last_step > 0))


def _lines(path: Path, last_step: int | None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for raw in file:
            try:
                line = json.loads(raw)
            except ValueError:
                continue
            if isinstance(line, dict) and (last_step is None or line.get("step", 0) <= last_step):
                yield raw.rstrip(b"\n") + b"\n", line
