"""Checks of queue backends: checkpoints, closing, tags, durability."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

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
from jackfield.sdk.cells import column_from_rows as jagged
from jackfield.sdk.cells import dense_column as dense
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support import expecting
from jackfield_conformance.support.processes import assert_nothing_left
from jackfield_conformance.support.transfer_queue import (
    PAGE,
    assert_holds,
    assert_reads,
    dtypes,
    filled,
    get,
    numbers,
    opened,
    pattern,
    put,
    put_and_be_killed,
    refused,
    sample_columns,
)


@check("TRQ-033", page=PAGE + "checkpoints")
async def a_checkpoint_is_exact(subject: Subject) -> None:
    """Another instance of the backend restores a checkpoint exactly: every partition, column, dtype and bit."""
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
        await assert_holds(backend, counted.samples, "restoring", counted.bytes)
        await assert_reads(backend, ["a", "b", "c"], sample_columns())
        await assert_reads(backend, ["b/\u00e4", "c"], {"n": dense(numbers(0, 2))}, "other/partition")
        await assert_reads(backend, ["x", "y", "z"], bits, "bits")


@check("TRQ-034", page=PAGE + "checkpoints", using=filled)
async def restoring_replaces(subject: Subject, backend: TransferQueueBackend) -> None:
    """Restoring replaces everything: what was put since, in any partition, is gone."""
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    columns = sample_columns()
    await backend.checkpoint(folder)
    await put(backend, ["b", "d"], {"reward": dense(numbers(0, 2)), "late": dense(numbers(0, 2))})
    await put(backend, ["a"], {"reward": dense(numbers(0, 1))}, "late-partition")
    await backend.delete(DeleteRequest(partition="train", keys=("a",)))
    await backend.restore(folder)
    await assert_reads(backend, ["a", "b", "c"], columns)
    with refused("queue.unknown-sample", "d"):
        await get(backend, ["d"], ["reward"])
    with refused("queue.column", "late"):
        await get(backend, ["b"], ["late"])
    with refused("queue.unknown-sample", "a"):
        await get(backend, ["a"], ["reward"], "late-partition")
    await assert_holds(backend, 3, "restoring")
    await put(backend, ["a"], {"late": dense(numbers(5, 1))})
    await assert_reads(backend, ["a"], {"late": dense(numbers(5, 1))})


@check("TRQ-035", page=PAGE + "checkpoints", using=filled)
async def a_checkpoint_is_a_snapshot(subject: Subject, backend: TransferQueueBackend) -> None:
    """A checkpoint has what was put before the call and nothing that came later, and producers need not stop."""
    folder = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    columns = sample_columns()

    async def produce() -> None:
        for number in range(8):
            await put(backend, [f"during-{number}"], {"n": dense(numbers(number, 1))})

    await asyncio.gather(backend.checkpoint(folder), produce())
    await assert_reads(backend, [f"during-{n}" for n in range(8)], {"n": dense(numbers(0, 8))})
    await put(backend, ["a", "b", "c"], sample_columns(seed=5))
    await put(backend, ["after"], {"n": dense(numbers(0, 1))})
    await backend.delete(DeleteRequest(partition="train", keys=("c",)))
    await backend.restore(folder)
    await assert_reads(backend, ["a", "b", "c"], columns)
    with refused("queue.unknown-sample", "after"):
        await get(backend, ["after"], ["n"])


@check("TRQ-036", page=PAGE + "checkpoints", using=opened)
async def checkpoints_do_not_mix(subject: Subject, backend: TransferQueueBackend) -> None:
    """Several checkpoints may be kept, each with its own state, and one may be written over another."""
    first, second = (SnapshotRequest(folder=str(subject.folder / name)) for name in ("first", "second"))
    await put(backend, ["a", "b"], {"n": dense(numbers(0, 2))})
    await backend.checkpoint(first)
    await put(backend, ["b", "c"], {"n": dense(numbers(10, 2))})
    await backend.checkpoint(second)
    await backend.delete(DeleteRequest(partition="train", keys=("a", "b", "c")))
    await backend.restore(first)
    await assert_reads(backend, ["a", "b"], {"n": dense(numbers(0, 2))})
    await backend.restore(second)
    await assert_reads(backend, ["a", "b", "c"], {"n": dense(torch.tensor([0, 10, 11]))})
    await backend.delete(DeleteRequest(partition="train", keys=("a", "b")))
    await backend.checkpoint(first)
    await backend.restore(second)
    await backend.restore(first)
    await assert_holds(backend, 1, "restoring a checkpoint of one row that was written over another")


@check("TRQ-037", page=PAGE + "checkpoints", using=filled)
async def restoring_from_nothing(subject: Subject, backend: TransferQueueBackend) -> None:
    """Restoring from a folder without a checkpoint raises an error that names it; it does not give an empty queue."""
    folder = subject.folder / "no-checkpoint-here"
    folder.mkdir()
    with expecting.refused(JackfieldError, naming="no-checkpoint-here"):
        await backend.restore(SnapshotRequest(folder=str(folder)))


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
        with expecting.refused(QueueError, "queue.closed", what=f"{name} after close"):
            await call()


@check("TRQ-039", page=PAGE + "life", using=filled)
async def closing_twice(subject: Subject, backend: TransferQueueBackend) -> None:
    """Closing is idempotent."""
    await backend.close()
    await backend.close()


@check("TRQ-040", page=PAGE + "life")
def nothing_is_left(subject: Subject) -> None:
    """A closed backend leaves nothing: no task, thread, process, open file, socket, shared memory or file elsewhere."""

    async def life(folder: Path) -> None:
        async with opened(subject, folder) as backend:
            await put(backend, ["a", "b", "c"], sample_columns())
            await put(backend, ["d"], {"large": jagged([pattern(torch.uint8, 1 << 16)])})
            await get(backend, ["a", "b", "c"], list(sample_columns()))
            await backend.checkpoint(SnapshotRequest(folder=str(folder.parent / "snapshots" / folder.name)))
            await backend.restore(SnapshotRequest(folder=str(folder.parent / "snapshots" / folder.name)))
            await backend.delete(DeleteRequest(partition="train", keys=("b",)))

    assert_nothing_left(life, subject.folder)


@check("TRQ-041", page=PAGE + "life")
async def instances_are_separate(subject: Subject) -> None:
    """Two backends in two folders share nothing."""
    async with opened(subject, subject.folder / "one") as one, opened(subject, subject.folder / "two") as two:
        await put(one, ["a", "b", "c"], sample_columns())
        await assert_holds(two, 0, "rows were put into the other backend", 0)
        with refused("queue.unknown-sample", "a"):
            await get(two, ["a"], ["reward"])


@check("TRQ-042", page=PAGE + "tags", using=filled)
async def tags_are_a_comment(subject: Subject, backend: TransferQueueBackend) -> None:
    """Tags may be put for any row at any time, and change neither values nor counts."""
    columns = sample_columns()
    tags: tuple[dict[str, Any], ...] = (
        {"task": "t/1", "length": 3, "score": 0.5, "parents": ["a"]},
        {},
        {"status": None},
    )
    request = TagsRequest(partition="train", keys=("a", "b", "c"), tags=tags)
    counted = await backend.stats()
    await backend.put_tags(request)
    await backend.put_tags(request)
    await assert_holds(backend, counted.samples, "tags were put", counted.bytes)
    await assert_reads(backend, ["a", "b", "c"], columns)


@check("TRQ-043", tier="capability", capability="durable", page=PAGE + "durability")
async def values_survive_a_restart(subject: Subject) -> None:
    """Another instance in the same folder has everything that was there when the first one was closed."""
    columns = sample_columns()
    async with opened(subject) as backend:
        await put(backend, ["a", "b", "c"], columns)
        await put(backend, ["x", "y", "z"], columns, "other")
        await backend.delete(DeleteRequest(partition="other", keys=("y",)))
    async with opened(subject) as backend:
        await assert_holds(backend, 5, "the restart")
        await assert_reads(backend, ["a", "b", "c"], columns)
        with refused("queue.unknown-sample", "y"):
            await get(backend, ["y"], ["reward"], "other")


@check("TRQ-044", tier="capability", capability="durable", page=PAGE + "durability", deadline_seconds=60.0)
def values_survive_kill_9(subject: Subject) -> None:
    """Puts and deletes survive ``kill -9`` of the process."""
    folder = subject.folder / "run"
    folder.mkdir(parents=True)
    put_and_be_killed(subject, folder, rounds=3)

    async def read() -> None:
        async with opened(subject, folder) as backend:
            await assert_holds(backend, 6, "kill -9")
            for number in range(3):
                columns = sample_columns(seed=number)
                for row in (0, 2):
                    reward = dense(columns["reward"].values[row : row + 1])
                    prompt = jagged([numbers(100 * number + 10 * row, (row * 2) % 5)])
                    await assert_reads(backend, [f"{number}-{row}"], {"reward": reward, "prompt_ids": prompt})

    asyncio.run(read())


@check("TRQ-045", tier="capability", capability="joins", page=PAGE + "further-processes")
async def a_further_client_shares_the_store(subject: Subject) -> None:
    """Two instances see each other's puts and deletes; when a client that joined closes, everything stays."""
    columns = sample_columns()
    async with opened(subject) as first:
        await put(first, ["a", "b", "c"], columns)
        async with opened(subject, joins=True) as second:
            await assert_reads(second, ["a", "b", "c"], columns)
            await put(second, ["x", "y", "z"], columns)
            await assert_reads(first, ["x", "y", "z"], {"reward": columns["reward"]})
            await first.delete(DeleteRequest(partition="train", keys=("x",)))
            with refused("queue.unknown-sample", "x"):
                await get(second, ["x"], ["reward"])
        await assert_holds(first, 5, "a client that had joined closed")
        await assert_reads(first, ["a", "b", "c"], {"reward": columns["reward"]})


@check("TRQ-046", page=PAGE + "loss", using=filled)
async def what_is_there_is_listed(subject: Subject, backend: TransferQueueBackend) -> None:
    """``keys`` lists the rows that were put and not deleted, with their columns, of one partition or of all."""
    columns = sample_columns()
    await put(backend, ["b"], {"late": dense(numbers(0, 1))})
    await put(backend, ["x"], {"n": dense(numbers(0, 1))}, "other")
    await backend.delete(DeleteRequest(partition="train", keys=("c",)))
    whole = {("train", "a"): {*columns}, ("train", "b"): {*columns, "late"}, ("other", "x"): {"n"}}
    for partition in (None, "train", "other", "elsewhere"):
        expected = {place: names for place, names in whole.items() if partition in (None, place[0])}
        listed = (await backend.keys(KeysRequest(partition=partition))).samples
        found = {place: {*names} for place, names in listed.items()}
        assert expected == found, f"of partition {partition!r} there is {expected}, and it lists {found}"
