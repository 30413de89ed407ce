"""Settings of the engine; importable without torch."""

from __future__ import annotations

from typing import Literal

import attrs
from attrs.validators import gt

from jackfield.sdk import option
from jackfield.sdk.one_sender import SessionSettings


@attrs.frozen(kw_only=True)
class Config(SessionSettings):
    """How weights are broadcast."""

    backend: Literal["auto", "gloo", "nccl"] = option(
        "auto",
        help="nccl needs a GPU of its own for the sender and each worker; auto: nccl where the trainer has one.",
    )
    bucket_bytes: int = option(
        32 * 2**20, help="Tensors are sent in buckets of this size, two at a time; larger ones alone.", validator=gt(0)
    )
