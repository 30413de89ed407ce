"""The fixture for ``jackfield plugins check``: the optimizers beside AdamW that need no further package."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fixture(folder: Path) -> dict[str, Any]:
    """Return the names of optimizers."""
    return {"optimizers": ("adafactor", "muon", "sgd")}
