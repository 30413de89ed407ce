"""Metrics as JSON lines, and the strict JSON of all observers."""

from __future__ import annotations

import json
import logging
import math
import numbers
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jackfield.files import replacing
from jackfield.observe.observer import MetricsObserver, listens
from jackfield.plugins.hooks import RunStarted

_RESERVED = frozenset({"kind", "not_finite", "step", "time"})
# Some readers end a line at these characters, too, which JSON allows inside a string.
_LINE_ENDS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class MetricsFile(MetricsObserver):
    """Writes ``metrics.jsonl``: one object per step, evaluation and weight synchronisation.

    Each has ``kind``, ``step``, ``time`` (seconds of work since the run's start, resumed parts added up) and the
    metrics. A NaN or an infinity is ``null`` and its name is in the list ``not_finite``. Every line is in the file
    when the hook returns. A resumed run first cuts the lines of steps after the restored one.
    """

    name = "metrics file"
    output = "metrics.jsonl"

    @listens()
    def run_started(self, event: RunStarted) -> None:
        """Open the file, and cut what a resumed run does again."""
        cut_after(self.path, event.first_step)
        self.go_on(read_lines(self.path))
        self.open_file(self.path)

    def record(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line."""
        not_finite: list[str] = []
        line: dict[str, Any] = {"kind": kind, "step": step, "time": round(self.seconds(), 6)}
        for key, value in metrics.items():
            name = f"metric/{key}" if key in _RESERVED else key
            line[name] = strict(number(value), not_finite, name)
        self.append(encode({**line, "not_finite": not_finite} if not_finite else line) + b"\n")


def encode(value: Mapping[str, Any]) -> bytes:
    """Write ``value`` as one line of strict JSON in UTF-8, without the line's end.

    Raises:
        ValueError: for NaN and infinities; see :func:`strict`.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False).translate(_LINE_ENDS)
    return text.encode("utf-8", errors="backslashreplace")  # a lone surrogate becomes its JSON escape


def number(value: Any) -> float | int:
    """Return a metric's value as a plain number; zero-dimensional arrays and tensors are numbers, too."""
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def strict(value: Any, not_finite: list[str], path: str = "") -> Any:
    """Return ``value`` in JSON's own types; paths of not-finite numbers, which become None, go to ``not_finite``."""
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
    """Yield the objects of a JSON-lines file, those of steps after ``last_step`` left out.

    A file that does not exist has none. A line that a kill or another program tore is skipped.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in map(_line, file):
            if line is not None and (last_step is None or line.get("step", 0) <= last_step):
                yield line


def _line(raw: bytes) -> dict[str, Any] | None:
    """Read a line; None where it is no JSON object."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return line if isinstance(line, dict) else None


def cut_after(path: Path, last_step: int) -> None:
    """Drop a JSON-lines file's lines of steps after ``last_step``, and torn lines, in one move.

    A run that begins at step 0 has restored nothing, so it keeps nothing.
    """
    if path.exists():
        if last_step > 0:
            _warn_of_damage(path)
        with replacing(path) as partial, partial.open("wb") as file:
            file.writelines(encode(line) + b"\n" for line in read_lines(path, last_step) if last_step > 0)


def _warn_of_damage(path: Path) -> None:
    """Warn of whole lines that are no JSON objects: more than a kill can tear."""
    with path.open("rb") as file:
        damaged = sum(_line(raw) is None for raw in file if raw.endswith(b"\n"))
    if damaged:
        logging.getLogger("jackfield").warning("%s: %d damaged lines are left out", path, damaged)
