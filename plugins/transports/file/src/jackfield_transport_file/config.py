"""Settings of the engine, and fixtures for the checks; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, gt

from jackfield.sdk import option
from jackfield.sdk.transfer import SessionSettings


@attrs.frozen(kw_only=True)
class Config(SessionSettings):
    """Settings that say where weights are written, and how long they stay."""

    folder: str = option(
        help="Where weights are written to; trainer and explorers reach it under this path, each its own."
    )
    keep: int = option(2, "Weights of so many transfers stay, for those who come late.", ge(1))
    bucket_bytes: int = option(
        256 * 2**20, "Tensors share files of this size; a larger tensor has one of its own.", gt(0)
    )
    poll_seconds: float = option(
        0.05, "How often a late reader looks at the folder: network file systems do not tell of changes.", gt(0)
    )


def folder(folder: Path) -> dict[str, Any]:
    """Return settings with a separate folder."""
    return {"settings": {"folder": str(folder / "weights"), "poll_seconds": 0.005}}
