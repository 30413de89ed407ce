"""What the trackers share: names of metrics, and rows of samples as columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: The columns of a table of samples.
COLUMNS = ("step", "key", "prompt", "response", "reward")


def named(kind: str, values: Mapping[str, float]) -> dict[str, float]:
    """Return metrics under the names that TensorBoard has: ``train/NAME``, ``evaluation/NAME``, ``weights/NAME``."""
    group = "train" if kind == "step" else kind
    return {f"{group}/{name}": float(value) for name, value in values.items()}


def cells(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    """Return rows of the sample table with the values of :data:`COLUMNS`."""
    return [[row.get(name) for name in COLUMNS] for row in rows]
