"""What is particular to the queue backend: others join, die, and speak otherwise; memory that is full or used again."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import DeleteRequest, GetRequest, PutRequest, TransferQueueContext
from jackfield.errors import QueueError
from jackfield.sdk.cells import dense_column
from jackfield.sdk.rpc import Address
from jackfield_joining import check_values_go_straight
from jackfield_testing import in_loop, refused
from jackfield_transport_nixl.backend import FILE, NIXLBackend
from jackfield_transport_nixl.config import QueueConfig

WIDTH = 1 << 17  #: float32 of a large row: 512 KiB


@contextlib.asynccontextmanager
async def opened(folder: Path | None = None, **settings: Any) -> AsyncIterator[NIXLBackend]:
    """A started backend, closed at the end."""
    context = TransferQueueContext(folder=None if folder is None else str(folder))
    backend = NIXLBackend(QueueConfig(**{"inline": True, **settings}), context)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def put(backend: NIXLBackend, values: dict[str, float], width: int = WIDTH) -> None:
    """A row for each value, which fills it."""
    column = dense_column(
        torch.tensor(list(values.values()), dtype=torch.float32)[:, None].expand(-1, width).contiguous()
    )
    await backend.put(PutRequest(partition="p", keys=tuple(values), columns={"x": column}))


async def values(backend: NIXLBackend, *keys: str) -> list[float]:
    """The value of each row, all of whose elements are equal."""
    found = (await backend.get(GetRequest(partition="p", keys=keys, columns=("x",)))).columns["x"].values
    assert bool((found == found[:, :1]).all())
    return [float(row[0]) for row in found]


async def until_it_fails(backend: NIXLBackend) -> None:
    """Read again and again."""
    while True:
        await values(backend, "c", "d")


@in_loop
async def test_rows_that_were_put_in_different_ways_are_read_together(tmp_path: Path) -> None:
    """Hundreds of small rows that came in messages, more than a message may carry; and with them rows that were
    written by transfers, by two processes' worth of backends. Memory that is used again has the new values."""
    async with opened(tmp_path, region_bytes=1 << 20) as store, opened(join=str(tmp_path / FILE)) as other:
        await put(store, {f"small {number}": number for number in range(300)}, 64)
        await put(other, {f"large {number}": 1000.0 + number for number in range(300)}, 64)
        names = [f"{sort} {number}" for number in range(300) for sort in ("large", "small")]
        expected = [number + base for number in range(300) for base in (1000.0, 0.0)]
        assert expected == await values(store, *names)
        assert expected == await values(other, *names)
        for turn in range(4):  # regions of other sizes take the place of those before
            await put(other, {"big": turn}, WIDTH * (turn + 1))
            assert [turn] == await values(store, "big")
            assert [turn] == await values(other, "big")


@in_loop
async def test_full_memory_is_waited_for_and_named() -> None:
    async with opened(max_bytes=1 << 21, region_bytes=1 << 20, seconds=0.5) as backend:
        await put(backend, {"a": 1, "b": 2})
        await put(backend, {"c": 3, "d": 4})
        with pytest.raises(QueueError) as caught:
            await put(backend, {"e": 5, "f": 6})
        assert "queue.full" == caught.value.code
    async with opened(max_bytes=1 << 21, region_bytes=1 << 20) as backend:
        await put(backend, {"a": 1, "b": 2})
        await put(backend, {"c": 3, "d": 4})
        waiting = asyncio.ensure_future(put(backend, {"e": 5, "f": 6}))
        await backend.stats()  # it has come after the put
        assert not waiting.done()
        await backend.delete(DeleteRequest(partition="p", keys=("a", "b")))
        await waiting
        assert [3, 4, 5, 6] == await values(backend, "c", "d", "e", "f")


@in_loop
async def test_strangers_are_refused_and_counted(tmp_path: Path) -> None:
    async with opened(tmp_path) as backend:
        address = Address.read(tmp_path / FILE)
        for noise in (b"GET / HTTP/1.1\r\n\r\n" * 9, b"JKR1" + b"\xff" * 99):
            reader, writer = await asyncio.open_unix_connection(f"\0{address.port}")
            writer.write(noise)
            assert b"" == (await reader.read()).partition(b"JKR1")[0], "nothing but the challenge"
            writer.close()
        content = (tmp_path / FILE).read_text()
        secret = content.partition('"secret": "')[2][:8]
        (tmp_path / "wrong.json").write_text(content.replace(secret, "00000000"))
        with pytest.raises(QueueError) as caught:
            async with opened(join=str(tmp_path / "wrong.json")):
                pass
        assert "queue.unreachable" == caught.value.code
        assert 3.0 == (await backend.stats()).details["refused"]


@pytest.mark.timeout(120)
@in_loop
async def test_kill_9_of_who_puts_and_of_who_keeps(tmp_path: Path) -> None:
    """What a killed producer put is there, and memory that it had asked for is free again; when the process is killed
    that keeps the rows, whoever reads is told at once, by name."""
    async with opened(tmp_path / "ours", inline=False, max_bytes=1 << 22, region_bytes=1 << 22) as backend:
        await put(backend, {"a": 1, "b": 2}, WIDTH // 4)
        command = [sys.executable, str(Path(__file__).with_name("ends.py")), str(tmp_path / "ours" / FILE)]
        with subprocess.Popen([*command, str(tmp_path / "theirs")], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                assert "ready\n" == await asyncio.to_thread(process.stdout.readline)
                async with opened(join=str(tmp_path / "theirs" / FILE)) as other:
                    assert [2, 3] == await values(other, "c", "d")
                    process.kill()
                    with pytest.raises(QueueError) as caught:
                        await until_it_fails(other)
                    assert "queue.unreachable" == caught.value.code
            finally:
                process.kill()
        assert [1, 2, 2, 3] == await values(backend, "a", "b", "c", "d")
        await put(backend, {"e": 5}, 3 << 18)  # 3 MiB, in the room that was meant for the dead
        assert [5] == await values(backend, "e")


@pytest.mark.timeout(180)
def test_workers_read_each_other_while_the_controllers_process_stands_still(tmp_path: Path) -> None:
    check_values_go_straight(NIXLBackend, QueueConfig(), tmp_path)


@in_loop
async def test_a_store_that_cannot_listen_says_so(tmp_path: Path) -> None:
    """The error of the process of the store is raised in the one that starts it, and nothing is left of either."""
    for inline in (True, False):
        with refused("queue.store", "192.0.2.1"):
            async with opened(tmp_path, host="192.0.2.1", inline=inline):
                pass
        assert [] == list(tmp_path.iterdir())
