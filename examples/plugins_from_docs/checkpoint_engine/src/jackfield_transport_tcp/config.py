"""Settings of the engine; importable without torch."""

from __future__ import annotations

import attrs
from attrs.validators import gt

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """How tensors are cut."""

    bucket_bytes: int = option(1 << 20, help="bytes that are handed to the network at once", validator=gt(0))
