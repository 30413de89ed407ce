"""TCP proxies between a sender and its workers."""

from __future__ import annotations

import asyncio
from typing import Any

import attrs


@attrs.define(eq=False)
class Proxy:
    """A TCP proxy of the address where tensors leave, which cuts all connections when one has carried so much."""

    after_bytes: int = 0  #: from the sender, of tensors
    times: int = 0
    carried: list[int] = attrs.field(factory=list)  #: by connection for tensors
    _tasks: set[asyncio.Task[None]] = attrs.field(factory=set)
    _ends: set[asyncio.StreamWriter] = attrs.field(factory=set)
    _servers: list[asyncio.Server] = attrs.field(factory=list)

    async def before(self, place: dict[str, Any]) -> dict[str, Any]:
        """Stand before a sender; what a worker is told of it then."""
        host, _, port = place["data"].removeprefix("tcp://").rpartition(":")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            await self._serve(reader, writer, host, int(port))

        self._servers.append(await asyncio.start_server(serve, "127.0.0.1", 0))
        return {"data": f"tcp://127.0.0.1:{self._servers[-1].sockets[0].getsockname()[1]}"}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, host: str, port: int) -> None:
        try:
            back, forth = await asyncio.open_connection(host, port)
        except BaseException:
            writer.transport.abort()
            raise
        self._ends |= {writer, forth}
        self.carried.append(0)
        ways = [asyncio.ensure_future(self._pump(back, writer, len(self.carried) - 1))]
        ways.append(asyncio.ensure_future(self._pump(reader, forth, None)))
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (writer, forth):
                end.transport.abort()
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int | None) -> None:
        while content := await reader.read(1 << 14):
            if number is not None:
                self.carried[number] += len(content)
                if number < self.times and self.carried[number] > self.after_bytes:
                    for end in self._ends:
                        end.transport.abort()
                    self._ends.clear()
                    break
            writer.write(content)
            await writer.drain()

    async def close(self) -> None:
        """End everything."""
        for server in self._servers:
            server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
