"""Settings of both plugins, and fixtures for the checks; importable without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
from attrs.validators import and_, ge, gt, le

from jackfield.sdk import option
from jackfield.sdk.transfer import SessionSettings

_DEVICES = "Network devices for UCX, as in UCX_NET_DEVICES (mlx5_0:1,mlx5_1:1); by default lo within a host, else all."


@attrs.frozen(kw_only=True)
class EngineConfig(SessionSettings):
    """Settings of the checkpoint engine."""

    bucket_bytes: int = option(
        4 * 2**20, "Tensors are read in buckets of this size; a larger tensor in several, or in place.", gt(0)
    )
    in_place: bool | None = option(
        None, "Register tensors larger than a bucket, and read them where they lie; null: within a host."
    )
    devices: str | None = option(None, _DEVICES)


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Settings of the queue backend."""

    join: str | None = option(
        None, "The store.json of a queue that another process has started; null: start one of its own."
    )
    inline: bool = option(
        False,
        "Keep values in the process that starts the queue, which they all enter then; false: beside it.",
    )
    host: str | None = option(
        None, "An address of this host where the store listens; null: as the run's other servers do."
    )
    port: int = option(0, "Where the store listens for metadata; 0: any port that is free.", and_(ge(0), le(65535)))
    devices: str | None = option(None, _DEVICES)
    device: str = option("cpu", "Of the registered memory: cpu, or a GPU such as cuda:0 (never tried).")
    inline_bytes: int = option(
        1 << 14,
        "Requests of fewer bytes carry the values themselves; larger ones move them by NIXL.",
        and_(ge(0), le(16 * 2**20)),
    )
    region_bytes: int = option(
        64 * 2**20, "Memory is registered in regions of this size; a larger put has one of its own.", gt(0)
    )
    max_bytes: int = option(
        8 * 2**30, "Registered memory of the store at most; beyond it, puts wait until rows are deleted.", gt(0)
    )
    seconds: float = option(30.0, "Longest time for one request.", gt(0))
    checkpoint_seconds: float = option(1800.0, "Longest time for a checkpoint or a restore.", gt(0))


def patient(folder: Path) -> dict[str, Any]:
    """Making connections takes several threads their turns; a deadline that is too short would name the wrong one.
    Large tensors in place, and copied."""
    copied = {"in_place": False}
    buckets = [{"bucket_bytes": 64}, {"bucket_bytes": 64, **copied}, {"bucket_bytes": 1000, **copied}, {}]
    return {"silence_seconds": 1.5, "bucket_settings": buckets}


def by_transfers(folder: Path) -> dict[str, Any]:
    """Return settings with which NIXL moves even small values, without a process that imports torch for each check."""
    return {"settings": {"inline": True, "inline_bytes": 64, "region_bytes": 1 << 20}}
