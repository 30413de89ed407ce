"""What ``jackfield plugins check file`` tries the engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def folder(folder: Path) -> dict[str, Any]:
    """A folder of its own."""
    return {"settings": {"folder": str(folder / "weights"), "poll_seconds": 0.005}}
