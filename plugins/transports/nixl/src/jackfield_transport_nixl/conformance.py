"""What ``jackfield plugins check`` tries the plugins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["by_transfers", "patient"]


def patient(folder: Path) -> dict[str, Any]:
    """Making connections takes several threads their turns; a deadline that is too short would name the wrong one."""
    return {"silence_seconds": 2.0}


def by_transfers(folder: Path) -> dict[str, Any]:
    """Even small values are moved by NIXL."""
    return {"settings": {"inline_bytes": 64, "region_bytes": 1 << 20}}
