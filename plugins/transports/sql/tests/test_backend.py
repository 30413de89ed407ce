"""What a database adds to the contract: people read it, several write to it, a put is whole or not there."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
import torch

from jackfield.abc.transfer_queue import (
    Column,
    DeleteRequest,
    GetRequest,
    PutRequest,
    SnapshotRequest,
    TagsRequest,
    TransferQueueContext,
)
from jackfield.errors import ConfigError, QueueError
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.sdk import structure
from jackfield.sdk.cells import column_from_rows, dense_column, json_column, rows_of
from jackfield_joining import check_values_go_straight
from jackfield_testing import in_loop, refused
from jackfield_transport_sql import rows as rows_module
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config
from jackfield_transport_sql.schema import VIEW

_WRITER = """
import asyncio, sys, torch
from jackfield.abc.transfer_queue import PutRequest, TransferQueueContext
from jackfield.sdk.cells import dense_column
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config

async def main():
    url, name = sys.argv[1:]
    backend = SQLBackend(Config(url=url, queue="shared"), TransferQueueContext())
    await backend.start()
    print(flush=True)
    for n in range(20):
        keys = (f"{name}-{n}", f"common-{n}")
        column = dense_column(torch.full((2,), float(n)))
        await backend.put(PutRequest(partition="p", keys=keys, columns={name: column}))
    await backend.close()

asyncio.run(main())
"""


def put(backend: Any, keys: str, **columns: Column) -> Any:
    return backend.put(PutRequest(partition="p", keys=tuple(keys), columns=columns))


def look(url: str, query: str) -> list[dict[str, Any]]:
    """What a person sees."""
    engine = sql.create_engine(sql.make_url(url).set(drivername="postgresql+psycopg") if "postgres" in url else url)
    with engine.connect() as connection:
        found = [dict(row) for row in connection.execute(sql.text(query)).mappings()]
    engine.dispose()
    return found


def make_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    vocabulary = {"what": 0, "is": 1, "2+3": 2, "five": 3, "<end>": 4}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))


@in_loop
async def test_a_person_reads_text_reward_and_tags_with_sql(url: str, opened: Any, tmp_path: Path) -> None:
    make_tokenizer(tmp_path)
    async with opened(
        url=url, queue="people", tokenizer=str(tmp_path), tag_columns=("task", "length", "key")
    ) as backend:
        await put(
            backend,
            "ab",
            prompt_ids=column_from_rows([torch.tensor([0, 1, 2])] * 2),
            response_ids=column_from_rows([torch.tensor([3, 4]), torch.tensor([4])]),
            task=json_column([{"question": "2+3 ä"}, {}]),
        )
        tags = ({"task": "t/1", "length": 2, "key": "K"}, {"task": "t/2"})
        await backend.put_tags(TagsRequest(partition="p", keys=("a", "b"), tags=tags))
        await put(backend, "ab", reward=column_from_rows([torch.tensor([0.25, 0.5]), torch.tensor([-1.0])]))
    shown = look(url, f"SELECT * FROM {VIEW} WHERE queue = 'people' ORDER BY key")
    assert all(row.pop("created") for row in shown)
    expected = {
        "queue": "people",
        "partition": "p",
        "key": "a",
        "state": "queued",
        "reward": 0.75,
        "prompt": "what is 2+3",
    }
    expected |= {"response": "five <end>", "task": "t/1", "tag_key": "K"}
    assert expected == {name: value for name, value in shown[0].items() if name not in ("tags", "length")}
    assert (2, {"task": "t/1", "length": 2, "key": "K"}) == (int(shown[0]["length"]), json.loads(shown[0]["tags"]))
    assert (-1.0, "<end>", "t/2", None) == tuple(shown[1][name] for name in ("reward", "response", "task", "length"))
    cells = look(url, "SELECT * FROM jackfield_cells WHERE queue = 'people' AND key = 'a' ORDER BY name")
    described = [(cell["name"], cell["type"], cell["bytes"]) for cell in cells]
    assert ("response_ids", '["jagged","int64",[]]', 16) == described[1]
    assert torch.tensor([3, 4]).numpy().tobytes() == bytes(cells[1]["content"])
    assert ('{"question":"2+3 ä"}', None) == (cells[3]["text"], cells[3]["content"])


@in_loop
async def test_what_people_read_of_a_sample_outlives_it(url: str, opened: Any, tmp_path: Path) -> None:
    query = f"SELECT key, state, reward, task FROM {VIEW} WHERE queue = 'h' ORDER BY key, state"
    done = {"key": "a", "state": "done", "reward": 1.5, "task": "t"}
    async with opened(url=url, queue="h") as backend:
        await put(backend, "ab", reward=dense_column(torch.tensor([1.5, 0.0])))
        await backend.put_tags(TagsRequest(partition="p", keys=("a",), tags=({"task": "t"},)))
        freed = await backend.delete(DeleteRequest(partition="p", keys=("a", "nobody")))
        assert (1, 1, 4) == (freed.samples, (stats := await backend.stats()).samples, stats.bytes)
        queued = {"key": "b", "state": "queued", "reward": 0.0, "task": None}
        assert [done, queued] == look(url, query)
        await put(backend, "a", reward=dense_column(torch.tensor([2.0])))  # the key comes again
        assert [done, {"key": "a", "state": "queued", "reward": 2.0, "task": None}, queued] == look(url, query)
        await backend.checkpoint(SnapshotRequest(folder=str(tmp_path / "snapshot")))
        await backend.delete(DeleteRequest(partition="p", keys=("a", "b")))
        assert [("a", "done", 2.0), ("b", "done", 0.0)] == [tuple(row.values())[:3] for row in look(url, query)]
        await backend.restore(SnapshotRequest(folder=str(tmp_path / "snapshot")))
        assert [("a", "queued", 2.0), ("b", "queued", 0.0)] == [tuple(row.values())[:3] for row in look(url, query)]
    async with opened(url=url, queue="h", history=False) as backend:
        await backend.delete(DeleteRequest(partition="p", keys=("a", "b")))
    assert [] == look(url, query)


@in_loop
async def test_tag_columns_change_only_when_they_are_named(url: str, opened: Any) -> None:
    async with opened(url=url, queue="q", tag_columns=("colour",)) as backend:
        await put(backend, "a", x=dense_column(torch.zeros(1)))
        await backend.put_tags(TagsRequest(partition="p", keys=("a",), tags=({"colour": "red"},)))
    async with opened(url=url, queue="q"):
        pass
    assert [{"colour": "red"}] == look(url, f"SELECT colour FROM {VIEW} WHERE queue = 'q'")


@in_loop
async def test_several_processes_write_at_once(url: str) -> None:
    """Rows of their own, and columns of common rows."""
    names = ("one", "two")
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _WRITER, url, "one", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    assert other.stdout is not None
    backend = SQLBackend(Config(url=url, queue="shared"), TransferQueueContext())
    await backend.start()
    await other.stdout.readline()  # it is about to begin
    for n in range(20):
        column = dense_column(torch.full((2,), float(n)))
        await backend.put(PutRequest(partition="p", keys=(f"two-{n}", f"common-{n}"), columns={"two": column}))
    _, errors = await other.communicate()
    assert 0 == other.returncode, errors
    assert (60, 320) == ((stats := await backend.stats()).samples, stats.bytes)
    keys = tuple(f"common-{n}" for n in range(20))
    found = await backend.get(GetRequest(partition="p", keys=keys, columns=names))
    assert [[float(n) for n in range(20)]] * 2 == [found.columns[name].values.tolist() for name in names]
    await backend.close()


@in_loop
async def test_a_put_that_fails_leaves_nothing(url: str, opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(url=url) as backend:
        await put(backend, "a", x=dense_column(torch.ones(1)))
        monkeypatch.setattr(rows_module, "_CELL_BYTES", 100)
        with pytest.raises(QueueError) as caught:
            await put(backend, "ab", x=dense_column(torch.zeros(2)), y=dense_column(torch.zeros(2, 64)))
        assert "queue.invalid" == caught.value.code
        assert (1, 4) == ((stats := await backend.stats()).samples, stats.bytes)
        found = await backend.get(GetRequest(partition="p", keys=("a",), columns=("x",)))
        assert [1.0] == found.columns["x"].values.tolist()


@in_loop
async def test_puts_and_deletes_of_the_same_rows_leave_no_cell_behind(url: str, opened: Any) -> None:
    async with opened(url=url) as backend:

        async def write(name: str, keys: str) -> None:
            for _ in range(6):
                await put(backend, keys, **{name: dense_column(torch.zeros(len(keys)))})

        async def remove(keys: str) -> None:
            for _ in range(6):
                await backend.delete(DeleteRequest(partition="p", keys=tuple(keys)))

        await asyncio.gather(write("x", "abcd"), write("y", "dcba"), remove("bdac"), remove("cadb"))
        await remove("abcd")
        assert (0, 0) == ((stats := await backend.stats()).samples, stats.bytes)


@in_loop
async def test_a_checkpoint_goes_on_in_another_backend_and_keeps_tags(url: str, opened: Any, tmp_path: Path) -> None:
    """To memory, which shows no tags, and back."""
    folders = [SnapshotRequest(folder=str(tmp_path / name)) for name in ("first", "second")]
    columns = {"x": column_from_rows([torch.tensor([1, 2]), torch.tensor([], dtype=torch.int64)])}
    async with opened(url=url, queue="q") as backend:
        await put(backend, "ab", **columns, y=json_column([{"n": 1}, None]))
        await backend.put_tags(TagsRequest(partition="p", keys=("a",), tags=({"task": "t"},)))
        await backend.checkpoint(folders[0])
        memory = MemoryBackend(MemoryConfig(), TransferQueueContext())
        await memory.restore(folders[0])
        await memory.checkpoint(folders[1])
        for folder, tags in ((folders[1], {}), (folders[0], {"task": "t"})):
            assert (2, 27) == ((read := await backend.restore(folder)).samples, read.bytes)
            found = await backend.get(GetRequest(partition="p", keys=("b", "a"), columns=("x", "y")))
            assert [[], [1, 2]] == [row.tolist() for row in rows_of(found.columns["x"])]
            assert [None, {"n": 1}] == rows_of(found.columns["y"])
            assert [{"tags": json.dumps(tags)}] == look(
                url, "SELECT tags FROM jackfield_samples WHERE queue = 'q' AND key = 'a'"
            )


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"url": "mysql://host/x"}, "url"),
        ({"url": "postgresql://h/x", "synchronous": "full"}, "synchronous"),
        ({"connections": 0}, "connections"),
        ({"seconds": 0.0}, "seconds"),
        ({"tag_columns": ('a"b',)}, "tag_columns"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure(Config, settings)
    assert named == caught.value.where


def test_a_tokenizer_that_is_not_there_is_told(opened: Any, tmp_path: Path) -> None:
    async def start() -> None:
        async with opened(tokenizer=str(tmp_path)):
            pass

    with refused("config.invalid-value", "tokenizer.json"):
        asyncio.run(start())


@pytest.mark.timeout(180)
def test_workers_read_each_other_while_the_controllers_process_stands_still(url: str, tmp_path: Path) -> None:
    check_values_go_straight(SQLBackend, Config(url=url), tmp_path / "queue")
