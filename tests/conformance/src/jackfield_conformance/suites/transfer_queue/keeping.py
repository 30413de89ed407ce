"""Checks of TransferQueue backends: checkpoints, the life of a backend, durability."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    KeysRequest,
    SnapshotRequest,
    TagsRequest,
    TransferQueueBackend,
    TransferQueueContext,
)
from jackfield.errors import JackfieldError, QueueError
from jackfield_conformance.registry import check
from jackfield_conformance.support.leaks import assert_nothing_left, other_tasks
from jackfield_conformance.support.transfer_queue import (
    PAGE,
    assert_holds,
    assert_same,
    dense,
    dtypes,
    get,
    jagged,
    numbers,
    opened,
    pattern,
    put,
    put_and_be_killed,
    refused,
    sample_columns,
)

if TYPE_CHECKING:
    from jackfield_conformance.subject import Subject


@check("TRQ-033", page=PAGE + "checkpoints")
async def a_checkpoint_is_exact(subject: Subject) -> None:
    """What a checkpoint wrote, another instance of the backend restores: every partition, column, dtype and bit."""
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    bits = {str(dtype): dense(pattern(dtype, 3, 5)) for dtype in dtypes()}
    bits["empty"] = jagged([pattern(torch.bfloat16, 0, 2)] * 3)
    async with opened(subject, subject.folder / "first") as backend:
        await put(backend, ["a", "b", "c"], sample_columns())
        await put(backend, ["b/\u00e4", "c"], {"n": dense(numbers(0, 2))}, "other/partition")
        await put(backend, ["x", "y", "z"], bits, "bits")
        counted = await backend.stats()
        await backend.checkpoint(folder)
    async with opened(subject, subject.folder / "second") as backend:
        await backend.restore(folder)
        await assert_holds(backend, counted.samples, counted.bytes, "restoring")
        found = await get(backend, ["a", "b", "c"], list(sample_columns()))
        for name, column in sample_columns().items():
            assert_same(column, found[name], name)
        other = await get(backend, ["b/\u00e4", "c"], ["n"], "other/partition")
        assert_same(dense(numbers(0, 2)), other["n"], "n of the other partition")
        restored = await get(backend, ["x", "y", "z"], list(bits), "bits")
        for name, column in bits.items():
            assert_same(column, restored[name], name)


@check("TRQ-034", page=PAGE + "checkpoints")
async def restoring_replaces(subject: Subject) -> None:
    """Restoring replaces everything: what was put since, in any partition, is gone."""
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    columns = sample_columns()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)
        await backend.checkpoint(folder)
        await put(backend, ["b", "d"], {"reward": dense(numbers(0, 2)), "late": dense(numbers(0, 2))})
        await put(backend, ["a"], {"reward": dense(numbers(0, 1))}, "late-partition")
        await backend.delete(DeleteRequest(partition="train", keys=("a",)))
        await backend.restore(folder)
        found = await get(backend, ["a", "b", "c"], list(columns))
        for name, column in columns.items():
            assert_same(column, found[name], name)
        with refused("queue.unknown-sample", "d"):
            await get(backend, ["d"], ["reward"])
        with refused("queue.column", "late"):
            await get(backend, ["b"], ["late"])
        with refused("queue.unknown-sample", "a"):
            await get(backend, ["a"], ["reward"], "late-partition")
        rows = (await backend.stats()).samples
        assert 3 == rows, f"three rows were restored, stats says {rows}"
        await put(backend, ["a"], {"late": dense(numbers(5, 1))})
        assert_same(dense(numbers(5, 1)), (await get(backend, ["a"], ["late"]))["late"], "late")


@check("TRQ-035", page=PAGE + "checkpoints")
async def a_checkpoint_is_a_snapshot(subject: Subject) -> None:
    """A checkpoint holds what was put before the call, nothing of what came after it, and producers need not stop."""
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    columns = sample_columns()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)

        async def produce() -> None:
            for number in range(8):
                await put(backend, [f"during-{number}"], {"n": dense(numbers(number, 1))})

        await asyncio.gather(backend.checkpoint(folder), produce())
        found = await get(backend, [f"during-{n}" for n in range(8)], ["n"])
        assert_same(dense(numbers(0, 8)), found["n"], "rows put while the checkpoint was written")
        await put(backend, ["a", "b", "c"], sample_columns(seed=5))
        await put(backend, ["after"], {"n": dense(numbers(0, 1))})
        await backend.delete(DeleteRequest(partition="train", keys=("c",)))
        await backend.restore(folder)
        restored = await get(backend, ["a", "b", "c"], list(columns))
        for name, column in columns.items():
            assert_same(column, restored[name], name)
        with refused("queue.unknown-sample", "after"):
            await get(backend, ["after"], ["n"])


@check("TRQ-036", page=PAGE + "checkpoints")
async def checkpoints_do_not_mix(subject: Subject) -> None:
    """Several checkpoints may be kept, each with its own state, and one may be written over another."""
    first, second = (SnapshotRequest(folder=str(subject.folder / name)) for name in ("first", "second"))
    async with opened(subject) as backend:
        await put(backend, ["a", "b"], {"n": dense(numbers(0, 2))})
        await backend.checkpoint(first)
        await put(backend, ["b", "c"], {"n": dense(numbers(10, 2))})
        await backend.checkpoint(second)
        await backend.delete(DeleteRequest(partition="train", keys=("a", "b", "c")))
        await backend.restore(first)
        assert_same(dense(numbers(0, 2)), (await get(backend, ["a", "b"], ["n"]))["n"], "n, of the first checkpoint")
        await backend.restore(second)
        found = (await get(backend, ["a", "b", "c"], ["n"]))["n"]
        assert_same(dense(torch.tensor([0, 10, 11])), found, "n, of the second checkpoint")
        await backend.delete(DeleteRequest(partition="train", keys=("a", "b")))
        await backend.checkpoint(first)
        await backend.restore(second)
        await backend.restore(first)
        rows = (await backend.stats()).samples
        assert 1 == rows, f"a checkpoint of one row, written over another, holds {rows}"


@check("TRQ-037", page=PAGE + "checkpoints")
async def restoring_from_nothing(subject: Subject) -> None:
    """Restoring from a folder that holds no checkpoint is an error that names the folder, and not an empty queue."""
    folder = subject.folder / "no-checkpoint-here"
    folder.mkdir()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], sample_columns())
        error: JackfieldError | None = None
        try:
            await backend.restore(SnapshotRequest(folder=str(folder)))
        except JackfieldError as caught:
            error = caught
        assert error is not None, "a folder without a checkpoint was restored"
        assert "no-checkpoint-here" in str(error), f"the error does not name the folder: {error}"


# -- life --------------------------------------------------------------------------------------------------------------


@check("TRQ-038", page=PAGE + "life")
async def closed_is_closed(subject: Subject) -> None:
    """A closed backend refuses every call with ``queue.closed``."""
    columns = sample_columns()
    (subject.folder / "run").mkdir(parents=True)
    backend: TransferQueueBackend = subject.make(TransferQueueContext(folder=str(subject.folder / "run")))
    await backend.start()
    await put(backend, ["a", "b", "c"], columns)
    await backend.close()
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "put": lambda: put(backend, ["a", "b", "c"], columns),
        "get": lambda: get(backend, ["a"], ["reward"]),
        "delete": lambda: backend.delete(DeleteRequest(partition="train", keys=("a",))),
        "stats": backend.stats,
        "checkpoint": lambda: backend.checkpoint(folder),
        "restore": lambda: backend.restore(folder),
    }
    for name, call in calls.items():
        code = None
        try:
            await call()
        except QueueError as error:
            code = error.code
        assert "queue.closed" == code, f"after close, {name} is expected to be refused with queue.closed, found {code}"


@check("TRQ-039", page=PAGE + "life")
async def closing_twice(subject: Subject) -> None:
    """Closing is idempotent."""
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], sample_columns())
        await backend.close()
        await backend.close()


@check("TRQ-040", page=PAGE + "life")
def nothing_is_left(subject: Subject) -> None:
    """A closed backend leaves nothing: no task, thread, process, open file, socket, shared memory or file elsewhere."""

    async def life(folder: Path) -> list[str]:
        async with opened(subject, folder) as backend:
            await put(backend, ["a", "b", "c"], sample_columns())
            await put(backend, ["d"], {"large": jagged([pattern(torch.uint8, 1 << 16)])})
            await get(backend, ["a", "b", "c"], list(sample_columns()))
            await backend.checkpoint(SnapshotRequest(folder=str(folder.parent / "snapshots" / folder.name)))
            await backend.restore(SnapshotRequest(folder=str(folder.parent / "snapshots" / folder.name)))
            await backend.delete(DeleteRequest(partition="train", keys=("b",)))
        return other_tasks()

    assert_nothing_left(life, subject.folder)


@check("TRQ-041", page=PAGE + "life")
async def instances_are_separate(subject: Subject) -> None:
    """Two backends in two folders share nothing."""
    async with (
        opened(subject, subject.folder / "one") as one,
        opened(subject, subject.folder / "two") as two,
    ):
        await put(one, ["a", "b", "c"], sample_columns())
        await assert_holds(two, 0, 0, "rows were put into the other backend")
        with refused("queue.unknown-sample", "a"):
            await get(two, ["a"], ["reward"])


@check("TRQ-042", page=PAGE + "tags")
async def tags_are_a_comment(subject: Subject) -> None:
    """Tags may be shown for any row at any time, and change neither values nor counts."""
    columns = sample_columns()
    tags: tuple[dict[str, Any], ...] = (
        {"task": "t/1", "length": 3, "score": 0.5, "parents": ["a"]},
        {},
        {"status": None},
    )
    request = TagsRequest(partition="train", keys=("a", "b", "c"), tags=tags)
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)
        counted = await backend.stats()
        await backend.put_tags(request)
        await backend.put_tags(request)
        await assert_holds(backend, counted.samples, counted.bytes, "tags were put")
        found = await get(backend, ["a", "b", "c"], list(columns))
        for name, column in columns.items():
            assert_same(column, found[name], name)


@check("TRQ-043", tier="capability", capability="durable", page=PAGE + "durability")
async def values_survive_a_restart(subject: Subject) -> None:
    """Another instance in the same folder has all that was there when the first one was closed."""
    columns = sample_columns()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)
        await put(backend, ["x", "y", "z"], columns, "other")
        await backend.delete(DeleteRequest(partition="other", keys=("y",)))
    async with opened(subject) as backend:
        rows = (await backend.stats()).samples
        assert 5 == rows, f"there were five rows before the restart, now {rows}"
        found = await get(backend, ["a", "b", "c"], list(columns))
        for name, column in columns.items():
            assert_same(column, found[name], name)
        with refused("queue.unknown-sample", "y"):
            await get(backend, ["y"], ["reward"], "other")


@check("TRQ-044", tier="capability", capability="durable", page=PAGE + "durability", deadline_seconds=60.0)
def values_survive_kill_9(subject: Subject) -> None:
    """What was put or deleted before ``kill -9`` of the process is so afterwards."""
    folder = subject.folder / "run"
    folder.mkdir(parents=True)
    put_and_be_killed(subject, folder, rounds=3)

    async def read() -> None:
        async with opened(subject, folder) as backend:
            rows = (await backend.stats()).samples
            assert 6 == rows, f"six rows had been put and not deleted before kill -9, {rows} are there"
            for number in range(3):
                columns = sample_columns(seed=number)
                for row, key in ((0, f"{number}-0"), (2, f"{number}-2")):
                    found = await get(backend, [key], ["reward", "prompt_ids"])
                    assert_same(dense(columns["reward"].values[row : row + 1]), found["reward"], f"reward of {key}")
                    prompt = jagged([numbers(100 * number + 10 * row, (row * 2) % 5)])
                    assert_same(prompt, found["prompt_ids"], f"prompt_ids of {key}")

    asyncio.run(read())


@check("TRQ-045", tier="capability", capability="joins", page=PAGE + "further-processes")
async def a_further_client_shares_the_store(subject: Subject) -> None:
    """What one instance puts or deletes, the other one sees; when a client that joined closes, everything stays."""
    columns = sample_columns()
    async with opened(subject) as first:
        await put(first, ["a", "b", "c"], columns)
        async with opened(subject, joins=True) as second:
            found = await get(second, ["a", "b", "c"], list(columns))
            for name, column in columns.items():
                assert_same(column, found[name], name)
            await put(second, ["x", "y", "z"], columns)
            assert_same(columns["reward"], (await get(first, ["x", "y", "z"], ["reward"]))["reward"], "reward")
            await first.delete(DeleteRequest(partition="train", keys=("x",)))
            with refused("queue.unknown-sample", "x"):
                await get(second, ["x"], ["reward"])
        rows = (await first.stats()).samples
        assert 5 == rows, f"five rows were there when a client that had joined closed, {rows} are left"
        assert_same(columns["reward"], (await get(first, ["a", "b", "c"], ["reward"]))["reward"], "reward")


@check("TRQ-046", page=PAGE + "loss")
async def what_is_there_is_listed(subject: Subject) -> None:
    """What is listed are the rows that were put and not deleted, with their columns, of one partition or of all."""
    columns = sample_columns()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)
        await put(backend, ["b"], {"late": dense(numbers(0, 1))})
        await put(backend, ["x"], {"n": dense(numbers(0, 1))}, "other")
        await backend.delete(DeleteRequest(partition="train", keys=("c",)))
        whole = {("train", "a"): {*columns}, ("train", "b"): {*columns, "late"}, ("other", "x"): {"n"}}
        for partition in (None, "train", "other", "elsewhere"):
            expected = {place: names for place, names in whole.items() if partition in (None, place[0])}
            listed = (await backend.keys(KeysRequest(partition=partition))).samples
            found = {place: {*names} for place, names in listed.items()}
            assert expected == found, f"of partition {partition!r} there is {expected}, and it lists {found}"
