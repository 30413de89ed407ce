"""What Redis adds to the contract: people read it, several write to it, checkpoints stop nobody."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
import redis
import torch

from jackfield.abc.transfer_queue import Column, DeleteRequest, GetRequest, PutRequest, SnapshotRequest, TagsRequest
from jackfield.abc.transfer_queue import TransferQueueContext as Context
from jackfield.errors import ConfigError, QueueError
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.sdk import structure
from jackfield.sdk.cells import column_from_rows, dense_column, json_column
from jackfield_joining import check_values_go_straight
from jackfield_servers import RedisServer
from jackfield_testing import in_loop
from jackfield_transport_redis import backend as backend_module
from jackfield_transport_redis.backend import RedisBackend
from jackfield_transport_redis.config import Config

pytestmark = pytest.mark.needs("redis")

_WRITER = """
import asyncio, sys, torch
from jackfield.abc.transfer_queue import PutRequest, TransferQueueContext
from jackfield.sdk.cells import dense_column
from jackfield_transport_redis.backend import RedisBackend
from jackfield_transport_redis.config import Config

async def main():
    url, name = sys.argv[1:]
    backend = RedisBackend(Config(url=url, queue="shared"), TransferQueueContext())
    await backend.start()
    print(flush=True)
    for n in range(50):
        column = dense_column(torch.full((2,), float(n)))
        await backend.put(PutRequest(partition="p", keys=(f"{name}-{n}", f"common-{n}"), columns={name: column}))
    await backend.close()

asyncio.run(main())
"""


async def put(backend: Any, keys: str, **columns: Column) -> None:
    await backend.put(PutRequest(partition="p", keys=tuple(keys), columns=columns))


async def numbers(backend: Any, keys: str, name: str = "x") -> list[float]:
    found = await backend.get(GetRequest(partition="p", keys=tuple(keys), columns=(name,)))
    return [float(number) for number in found.columns[name].values]


def ones(rows: int, value: float = 1.0) -> Column:
    return dense_column(torch.full((rows,), value))


@in_loop
async def test_a_person_reads_rows_with_redis_cli(redis_server: RedisServer, opened: Any) -> None:
    async with opened(url=redis_server.url, queue="people") as backend:
        await put(backend, "a", ids=column_from_rows([torch.tensor([3, 4])]), task=json_column([{"question": "2+3"}]))
        tags = ({"task": "t/1"}, {"task": "t/2"})
        await backend.put_tags(TagsRequest(partition="p", keys=("a", "nobody"), tags=tags))
    with redis.Redis.from_url(redis_server.url) as client:
        expected = {
            b"h:ids": b'["jagged","int64",[]]',
            b"v:ids": torch.tensor([3, 4]).numpy().tobytes(),
            b"h:task": b'["json","uint8",[]]',
            b"v:task": b'{"question":"2+3"}',
            b"tags": b'{"task": "t/1"}',
        }
        row = client.hgetall("jackfield:people:row:1:p:a")
        digests = {name: value[:16] for name, value in row.items() if name.startswith(b"h:")}
        assert expected == {name: value.removeprefix(digests.get(name, b"")) for name, value in row.items()}
        assert all(int(digest, 16) >= 0 for digest in digests.values())
        assert [b"jackfield:people:row:1:p:a"] == client.keys("jackfield:people:row:*")


@in_loop
async def test_several_processes_write_at_once(redis_server: RedisServer) -> None:
    """Rows of their own, and columns of common rows."""
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRITER, redis_server.url, "one", stdout=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    backend = RedisBackend(Config(url=redis_server.url, queue="shared"), Context())
    await backend.start()
    await other.stdout.readline()  # it is about to begin
    for n in range(50):
        column = dense_column(torch.full((2,), float(n)))
        await backend.put(PutRequest(partition="p", keys=(f"two-{n}", f"common-{n}"), columns={"two": column}))
    assert 0 == await other.wait()
    assert (150, 800) == ((stats := await backend.stats()).samples, stats.bytes)
    keys = tuple(f"common-{n}" for n in range(50))
    found = await backend.get(GetRequest(partition="p", keys=keys, columns=("one", "two")))
    assert [[float(n) for n in range(50)]] * 2 == [found.columns[name].values.tolist() for name in ("one", "two")]
    await backend.close()


@in_loop
async def test_a_checkpoint_has_the_rows_of_one_moment_whatever_others_do_meanwhile(
    redis_server: RedisServer, opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two of its steps another process replaces, deletes and adds rows."""
    monkeypatch.setattr(backend_module, "BATCH_ROWS", 1)
    folder = SnapshotRequest(folder=str(tmp_path / "snapshot"))
    async with opened(url=redis_server.url) as backend, opened(url=redis_server.url) as other:
        await put(backend, "abcdef", x=dense_column(torch.arange(6.0)), y=ones(6))
        changes = [
            put(other, "bc", x=ones(2, 90.0)),
            other.delete(DeleteRequest(partition="p", keys=tuple("ad"))),
            put(other, "ga", x=ones(2, 91.0), z=ones(2)),
            put(other, "bef", x=ones(3, 92.0)),
        ]
        take = RedisBackend._take

        async def take_and_change(self: RedisBackend, *arguments: Any) -> Any:
            found = await take(self, *arguments)
            if changes:
                await changes.pop(0)
            return found

        monkeypatch.setattr(RedisBackend, "_take", take_and_change)
        written = await backend.checkpoint(folder)
        assert ((6, 48), []) == ((written.samples, written.bytes), changes)
        assert [92.0, 90.0, 91.0] == await numbers(other, "bca")
        memory = MemoryBackend(MemoryConfig(), Context())
        await memory.restore(folder)
        assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] == await numbers(memory, "abcdef")
        await other.restore(folder)
        assert [0.0, 1.0, 2.0, 3.0, 4.0, 5.0] == await numbers(backend, "abcdef")
        assert (6, 48) == ((stats := await backend.stats()).samples, stats.bytes)
        prefix = backend._prefix
    with redis.Redis.from_url(redis_server.url) as client:
        kept = [key for key in client.keys(f"{prefix}*") if b":row:" not in key]
    assert sorted(f"{prefix}{name}".encode() for name in ("bytes", "format", "rows")) == sorted(kept)


@in_loop
async def test_two_checkpoints_at_once_are_refused_and_a_dead_one_is_forgotten(
    redis_server: RedisServer, opened: Any, tmp_path: Path
) -> None:
    folder = SnapshotRequest(folder=str(tmp_path / "snapshot"))
    async with opened(url=redis_server.url) as backend:
        await put(backend, "ab", x=ones(2))
        with redis.Redis.from_url(redis_server.url) as client:
            client.set(f"{backend._prefix}saving", "somebody else")
            with pytest.raises(QueueError) as caught:
                await backend.checkpoint(folder)
            assert "queue.store" == caught.value.code
            client.copy(f"{backend._prefix}rows", f"{backend._prefix}pending")
            await put(backend, "a", x=ones(1, 2.0))  # kept for somebody else,
            client.delete(f"{backend._prefix}saving")  # whose time is over
        await put(backend, "b", x=ones(1, 3.0))
        assert 2 == (await backend.checkpoint(folder)).samples
        await backend.restore(folder)
        assert [2.0, 3.0] == await numbers(backend, "ab")


@pytest.mark.parametrize(("settings", "named"), [({"url": "http://host"}, "url"), ({"seconds": 0.0}, "seconds")])
def test_settings_that_cannot_be(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure(Config, settings)
    assert named == caught.value.where


@pytest.mark.timeout(180)
def test_workers_read_each_other_while_the_controllers_process_stands_still(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    check_values_go_straight(RedisBackend, Config(url=redis_server.url), tmp_path / "queue")
