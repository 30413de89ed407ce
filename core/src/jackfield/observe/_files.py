"""Files of JSON lines: strict JSON in UTF-8, and what a resumed run keeps of them."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jackfield.files import replacing

__all__ = ["cut_after", "encode", "number", "read_lines", "strict"]

# Some readers end a line at these characters, too, which JSON allows inside a string.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


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
        with replacing(path) as partial, partial.open("wb") as file:
            file.writelines(raw for raw, _ in _lines(path, last_step) if last_step > 0)


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
