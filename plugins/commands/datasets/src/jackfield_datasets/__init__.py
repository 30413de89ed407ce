"""Sets of tasks that are not JSONL files, and the command ``jackfield data``."""

from __future__ import annotations

from jackfield_datasets.lines import first_records, open_lines
from jackfield_datasets.recognition import recognise
from jackfield_datasets.sets import MixedOrder, MixedSet, describe, example, fitted, open_tasks

__all__ = [
    "MixedOrder",
    "MixedSet",
    "describe",
    "example",
    "first_records",
    "fitted",
    "open_lines",
    "open_tasks",
    "recognise",
]
