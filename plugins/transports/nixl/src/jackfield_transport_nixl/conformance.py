"""What ``jackfield plugins check`` tries the plugins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def patient(folder: Path) -> dict[str, Any]:
    """Making connections takes several threads their turns; a deadline that is too short would name the wrong one.
    Large tensors in place, and copied."""
    copied = {"in_place": False}
    buckets = [{"bucket_bytes": 64}, {"bucket_bytes": 64, **copied}, {"bucket_bytes": 1000, **copied}, {}]
    return {"silence_seconds": 1.5, "bucket_settings": buckets}


def by_transfers(folder: Path) -> dict[str, Any]:
    """Even small values are moved by NIXL."""
    return {"settings": {"inline_bytes": 64, "region_bytes": 1 << 20}}
