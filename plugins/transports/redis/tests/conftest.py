"""Shorthands for all tests of the plugin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield_transport_redis.backend import RedisBackend
from jackfield_transport_redis.config import Config

Open = Callable[..., AbstractAsyncContextManager[RedisBackend]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A started backend on the queue of this test."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[RedisBackend]:
        backend = RedisBackend(Config(**settings), TransferQueueContext(folder=str(tmp_path / "run" / "queue")))
        await backend.start()
        try:
            yield backend
        finally:
            await backend.close()

    return make
