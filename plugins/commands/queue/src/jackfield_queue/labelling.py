"""Writes late labels of a run's samples, a version in each file."""

from __future__ import annotations

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.files import seal, sync
from jackfield.queue.labels import FOLDER, Labels, read_labels

_NAME = re.compile(r"[a-zA-Z_]\w*")


def write_labels(folder: Path, file: Path, by: str) -> Labels:
    """Write the next version of a run's labels from a JSONL file, whose lines have ``key`` and numbers by name.

    If the last version has the same labels, it is returned. A line that is not such a one raises ``queue.invalid``.
    """
    numbers = _read_lines(file)
    (folder / FOLDER).mkdir(exist_ok=True)
    while True:
        *_, last = [Labels(version=0, by="", numbers={}), *read_labels(folder)]
        if (last.by, last.numbers) == (by, numbers):
            return last
        made = Labels(version=last.version + 1, by=by, numbers=numbers)
        target = folder / FOLDER / f"{made.version:08}.json"
        partial = target.with_suffix(f".{os.getpid()}.partial")
        partial.write_text(seal(json.dumps(attrs.asdict(made))))
        sync(partial)
        try:
            os.link(partial, target)  # fails if another process has written this version
        except FileExistsError:
            continue
        finally:
            partial.unlink()
        sync(target.parent)
        return made


def _read_lines(file: Path) -> dict[str, dict[str, float]]:
    numbers = dict[str, dict[str, float]]()
    with file.open("rb") as lines:
        for place, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                record: Any = json.loads(line)
                key = record.pop("key")
                own = {name: float(value) for name, value in record.items() if _is_number(name, value)}
            except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
                raise _refused(file, place, f"{type(error).__name__}: {error}") from error
            if not isinstance(key, str) or key in numbers or len(own) != len(record) or not own:
                found = "a key that came before" if isinstance(key, str) and key in numbers else line.decode()[:200]
                raise _refused(file, place, found)
            numbers[key] = own
    return numbers


def _is_number(name: str, value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and _NAME.fullmatch(name) is not None


def _refused(file: Path, place: int, found: str) -> QueueError:
    expected = '{"key": "train/3/1/0/2/0", "reward": 1.0, "utility": 0.3}: a sample, and finite numbers by name'
    return QueueError("a line is no label", where=f"{file}:{place}", expected=expected, found=found)
