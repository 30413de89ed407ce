"""What every queue backend with a server behind it has to do when the server dies or hangs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import torch

from jackfield.abc.transfer_queue import GetRequest, PutRequest
from jackfield.sdk.cells import dense_column
from jackfield_testing import refused

#: Opens a backend with these settings.
Opened = Callable[..., AbstractAsyncContextManager[Any]]


class Server(Protocol):
    """A server that a test may kill and start again at the same place."""

    url: str
    port: int

    def start(self) -> None: ...
    def kill(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


async def put(backend: Any, key: str, value: float = 1.0, size: int = 256) -> None:
    """A row of so many float32, all of one value."""
    column = dense_column(torch.full((1, size), value))
    await backend.put(PutRequest(partition="p", keys=(key,), columns={"x": column}))


async def values(backend: Any, keys: Sequence[str]) -> list[float]:
    """The value of each row."""
    found = await backend.get(GetRequest(partition="p", keys=tuple(keys), columns=("x",)))
    return [row[0].item() for row in found.columns["x"].values]


async def check_kill_9_of_the_server(opened: Opened, server: Server, rows: int, before: int, **settings: Any) -> None:
    """Every put that had returned is there, and those under way end well once the server is back.

    Args:
        opened: of the plugin's tests.
        server: confirms only what is on disk.
        rows: of each of four producers.
        before: so many puts have returned when the server is killed.
        settings: of the backend.
    """
    returned: list[str] = []
    enough = asyncio.Event()

    async with opened(url=server.url, **settings) as backend:

        async def produce(name: str) -> None:
            for number in range(rows):
                await put(backend, f"{name}{number}", float(number))
                returned.append(f"{name}{number}")
                if len(returned) >= before:
                    enough.set()

        producers = [asyncio.ensure_future(produce(name)) for name in "abcd"]
        await enough.wait()
        server.kill()
        confirmed = list(returned)
        server.start()
        assert [float(key[1:]) for key in confirmed] == await values(backend, confirmed)
        await asyncio.gather(*producers)
        assert (4 * rows, 4 * rows * 1024) == ((stats := await backend.stats()).samples, stats.bytes)
        assert [float(key[1:]) for key in returned] == await values(backend, returned)


async def check_a_hanging_server_is_named(opened: Opened, server: Server, seconds: float) -> None:
    """Within the deadline; the same when it is gone. Afterwards everything works."""
    async with opened(url=server.url, seconds=seconds) as backend:
        await put(backend, "a")
        server.pause()
        with refused("queue.unreachable", f"127.0.0.1:{server.port}") as caught:
            await put(backend, "b")
        assert "queue.unreachable" == caught.value.code
        server.resume()
        await put(backend, "c")
        server.kill()
        with refused("queue.unreachable", f"127.0.0.1:{server.port}") as caught:
            await values(backend, ["a"])
        assert "queue.unreachable" == caught.value.code
        server.start()
        assert [1.0, 1.0] == await values(backend, ["a", "c"])
