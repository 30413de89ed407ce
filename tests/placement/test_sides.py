"""Whether the engine and the replicas of one process work at the same time or in turns."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.compose.workers import WorkerFactory
from jackfield.config import make_config
from jackfield.plugins import discover
from jackfield.queue.values import MemoryBackend, MemoryConfig


@pytest.mark.parametrize(
    ("cores", "cluster", "expected"),
    [
        (2, {"device": "cpu", "threads": 1, "replicas": 1}, False),
        (1, {"device": "cpu", "threads": 1, "replicas": 1}, True),
        (4, {"device": "cpu", "threads": 2, "replicas": 1}, False),
        (4, {"device": "cpu", "threads": 2, "replicas": 2}, True),
        (64, {"device": "cpu", "replicas": 1}, True),
        (64, {"device": "cuda", "threads": 1, "replicas": 1}, True),
        (None, {"device": "cpu", "threads": 1, "replicas": 1}, True),
    ],
    ids=["a core each", "too few", "two each", "a replica too many", "no threads given", "a GPU", "unknown cores"],
)
def test_sides_take_turns_unless_each_has_its_own_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int | None, cluster: dict[str, Any], expected: bool
) -> None:
    """On a CPU, the threads of the engine and of each replica have to fit the cores."""
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    config = make_config({"model": {"path": "none"}, "cluster": {"name": "inline", **cluster}}, ())
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    factory = WorkerFactory(config=config, registry=discover(), clock=Clock())
    monkeypatch.setattr(WorkerFactory, "agent_worker", AsyncMock(return_value=None))
    parts: Any = {"engines": (), "algorithm": None, "arrays": False}
    role: Any = SimpleNamespace(scores=False, evaluates=False, generates=True, **parts)

    async def open_queue() -> MemoryBackend:
        return MemoryBackend(MemoryConfig(), TransferQueueContext())

    async def made() -> bool:
        async with AsyncExitStack() as stack:
            return (await factory.make(role, stack, open_queue)).shares_devices

    assert expected == asyncio.run(made())
