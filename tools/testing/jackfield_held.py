"""Calls in other processes that a test holds: each connects to the socket ``held`` in a folder, and waits for a byte.

async with HeldCalls(folder) as gate:
    await gate.wait_for(lambda: gate.count == 1)  # a call has connected, and has sent a byte
    gate.release()  # it goes on, and so do those to come
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Self

_SECONDS = 60.0


class HeldCalls:
    """The other end of calls that are held."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self._is_open = folder, 0, False
        self._changed = asyncio.Condition()
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._arrived, self.folder / "held")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        self._writers.append(writer)
        async with self._changed:
            self.count += 1
            self._changed.notify_all()
        if self._is_open:
            writer.write(b"x")
        await reader.read()
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so after a call has been held, or has left."""
        async with self._changed:
            await asyncio.wait_for(self._changed.wait_for(is_so), _SECONDS)

    def release(self) -> None:
        """Let all calls go on, also those to come."""
        self._is_open = True
        for writer in self._writers:
            with suppress(OSError):
                writer.write(b"x")
