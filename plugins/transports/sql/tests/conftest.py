"""The databases, and shorthands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config

Open = Callable[..., AbstractAsyncContextManager[SQLBackend]]


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.needs("postgres"))])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of each database in turn."""
    if request.param == "postgresql":
        server: str = request.getfixturevalue("postgres_server").url
        return server
    return f"sqlite:///{tmp_path / 'samples.sqlite'}"


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """A started backend on the queue of this test."""

    @asynccontextmanager
    async def make(**settings: Any) -> AsyncIterator[SQLBackend]:
        backend = SQLBackend(Config(**settings), TransferQueueContext(folder=str(tmp_path / "run" / "queue")))
        await backend.start()
        try:
            yield backend
        finally:
            await backend.close()

    return make
