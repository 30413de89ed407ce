"""A function for the operator ``function_filter``."""

from __future__ import annotations

from typing import Any


def teaches(row: dict[str, Any]) -> bool:
    """Keep tasks that a model solves sometimes."""
    return 0.0 < row["pass_rate"] < 1.0
