"""Sets of tasks that are not JSONL files, and the command ``jackfield data``."""

from __future__ import annotations

from jackfield_datasets.recognition import recognise
from jackfield_datasets.sets import MixedOrder, MixedSet, describe, example, fitted, open_tasks

__all__ = ["MixedOrder", "MixedSet", "describe", "example", "fitted", "open_tasks", "recognise"]
