"""Settings of the engine, and what they are tried with; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import gt

from jackfield.sdk import option
from jackfield.sdk.one_sender import SessionSettings


@attrs.frozen(kw_only=True)
class Config(SessionSettings):
    """How weights are broadcast."""

    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto", "nccl needs a GPU of its own for the sender and each worker; auto: nccl where the trainer has one."
    )
    bucket_bytes: int = option(
        32 * 2**20, "Tensors are sent in buckets of this size, two at a time; larger ones alone.", gt(0)
    )


def patient(folder: Path) -> dict[str, Any]:
    """Forming a group takes several threads their turns, so a deadline that is too short would name the wrong one."""
    return {"silence_seconds": 1.5}
