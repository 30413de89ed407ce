"""Queues of the tests."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    """A started backend with these settings in the test's folder, closed at the end."""

    @contextlib.asynccontextmanager
    async def open_backend(**settings: Any) -> AsyncIterator[ZMQBackend]:
        backend = ZMQBackend(QueueConfig(**settings), TransferQueueContext(folder=str(tmp_path / "queue")))
        await backend.start()
        try:
            yield backend
        finally:
            await backend.close()

    return open_backend
