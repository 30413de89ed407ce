"""Settings of the plugins, and fixtures for the checks; importable without zmq."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import attrs
from attrs.validators import and_, ge, gt, le, optional

from jackfield.sdk import option
from jackfield.sdk.transfer import SessionSettings


@attrs.frozen(kw_only=True)
class QueueConfig:
    """Settings of the queue backend."""

    units: int = option(1, "Storage units, each a process, at the start.", and_(ge(1), le(256)))
    join: str | None = option(
        None, "The units.json of a queue that another process has started; null: start units of its own."
    )
    host: str | None = option(
        None, "An address of this host where units listen; null: as the run's other servers do, on loopback by default."
    )
    encrypted: bool | None = option(None, "TCP with CURVE, for who has the queue's units.json; null: beyond loopback.")
    shared_from_bytes: int | None = option(
        1 << 16,
        "A put of so many bytes or more goes through shared memory, where producer and unit share a host; "
        "null: this process uses no shared memory.",
        optional(ge(1)),
    )
    shared_max_bytes: int = option(
        8 * 2**30, "Shared memory of one producer at most; beyond it, its puts wait until rows are deleted.", gt(0)
    )
    seconds: float = option(30.0, "Longest time for one request.", gt(0))


@attrs.frozen(kw_only=True)
class EngineConfig(SessionSettings):
    """Settings of the checkpoint engine."""

    bucket_bytes: int = option(
        4 * 2**20,
        "Size of a message that small tensors share; a tensor up to four times that goes alone, larger ones in "
        "pieces of this size.",
        gt(0),
    )
    transport: Literal["auto", "ipc", "tcp"] = option(
        "auto", "ipc: within this host only; tcp; auto: ipc where the sender listens on loopback, else tcp."
    )
    encrypted: bool | None = option(None, "TCP with CURVE; null: beyond loopback.")
    data_port: int = option(0, "Where tensors leave, with tcp; 0: any port that is free.", and_(ge(0), le(65535)))


def two_units(folder: Path) -> dict[str, Any]:
    """Return settings with two units, and shared memory for even small values."""
    return {"settings": {"units": 2, "shared_from_bytes": 256}}
