"""Settings of the engine; importable without torch."""

from __future__ import annotations

import attrs
from attrs.validators import gt

from jackfield.sdk import option
from jackfield.sdk.transfer import SessionSettings


@attrs.frozen(kw_only=True)
class Config(SessionSettings):
    """How weights are laid into shared memory."""

    bucket_bytes: int = option(
        64 * 2**20, "Tensors share segments of this size; a larger tensor has one of its own.", gt(0)
    )
    max_bytes: int = option(
        8 * 2**30,
        "Shared memory in use at most (a larger tensor still passes); beyond it, publishing waits for workers.",
        gt(0),
    )
    gpu_max_bytes: int = option(
        256 * 2**20, "The same limit of a GPU's memory, which is used if all workers have the sender's GPU.", gt(0)
    )
