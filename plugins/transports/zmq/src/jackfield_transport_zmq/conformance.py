"""What ``jackfield plugins check`` tries the plugins with."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def two_units(folder: Path) -> dict[str, Any]:
    """Rows are spread over two units, and even small values go through shared memory."""
    return {"settings": {"units": 2, "shared_from_bytes": 256}}
