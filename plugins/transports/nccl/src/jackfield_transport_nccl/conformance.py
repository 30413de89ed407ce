"""What ``jackfield plugins check nccl`` tries the engine with."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def patient(folder: Path) -> dict[str, Any]:
    """Forming a group takes several threads their turns, so a deadline that is too short would name the wrong one."""
    return {"silence_seconds": 1.5}
