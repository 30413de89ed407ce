"""Settings of both plugins; importable without torch."""

from __future__ import annotations

import attrs
from attrs.validators import and_, ge, gt, le

from jackfield.structuring import option

__all__ = ["EngineConfig"]

_DEVICES = "Network devices for UCX, as in UCX_NET_DEVICES (mlx5_0:1,mlx5_1:1); by default lo within a host, else all."


@attrs.frozen(kw_only=True)
class EngineConfig:
    """How workers read weights."""

    bucket_bytes: int = option(
        8 * 2**20,
        help="Tensors are read in buckets of this size; a larger tensor in several.",
        validator=gt(0),
    )
    devices: str | None = option(None, help=_DEVICES)
    port: int = option(
        0, help="Where the sender listens for workers; 0: any port that is free.", validator=and_(ge(0), le(65535))
    )
