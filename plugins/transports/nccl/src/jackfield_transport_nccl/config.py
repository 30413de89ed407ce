"""Settings of the engine, and fixtures for the checks; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt

from jackfield.sdk import option
from jackfield.sdk.transfer import SessionSettings


@attrs.frozen(kw_only=True)
class Config(SessionSettings):
    """Settings of the broadcast."""

    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "nccl needs a GPU of its own for the sender and each worker; auto: nccl where all have one, else gloo."
    )
    bucket_bytes: int = option(
        16 * 2**20, "Tensors are sent in buckets of this size, two at a time; larger ones alone.", gt(0)
    )


def patient(folder: Path) -> dict[str, Any]:
    """Return settings with a long deadline: forming a group takes turns of several threads."""
    return {"silence_seconds": 1.5}
