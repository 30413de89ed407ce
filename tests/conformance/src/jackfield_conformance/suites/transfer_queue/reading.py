"""Checks of TransferQueue backends: what is read, deleted and counted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from jackfield.abc.transfer_queue import DeleteRequest, SnapshotRequest, TransferQueueBackend
from jackfield_conformance.registry import check
from jackfield_conformance.support.transfer_queue import (
    PAGE,
    assert_holds,
    assert_reads,
    assert_same,
    dense,
    filled,
    get,
    jagged,
    json_texts,
    numbers,
    opened,
    pattern,
    put,
    refused,
    sample_columns,
)

if TYPE_CHECKING:
    from jackfield_conformance.subject import Subject


@check("TRQ-022", page=PAGE + "get", using=opened)
async def order_of_keys(subject: Subject, backend: TransferQueueBackend) -> None:
    """A read returns the rows in the order of its keys, any of them, whatever the order they were put in."""
    keys = ["b", "d", "a", "c"]
    await put(backend, keys, {"n": dense(numbers(0, 4)), "j": jagged([numbers(n, n) for n in range(4)])})
    for wanted in (["a", "b", "c", "d"], ["d", "b"], ["c"], ["c", "a", "d", "b"]):
        found = await get(backend, wanted, ["n", "j"])
        places = [keys.index(key) for key in wanted]
        assert places == found["n"].values.tolist(), f"asked for {wanted}, got the rows put at {found['n'].values}"
        assert_same(jagged([numbers(n, n) for n in places]), found["j"], f"rows {wanted}")


@check("TRQ-023", page=PAGE + "get", using=filled)
async def just_the_columns(subject: Subject, backend: TransferQueueBackend) -> None:
    """A read returns the columns that it names, and no others."""
    for wanted in (["reward"], ["values", "prompt_ids"]):
        found = await get(backend, ["a", "b", "c"], wanted)
        assert sorted(wanted) == sorted(found), f"asked for {wanted}, got {sorted(found)}"


@check("TRQ-024", page=PAGE + "get", using=filled)
async def reading_changes_nothing(subject: Subject, backend: TransferQueueBackend) -> None:
    """A read can be repeated: it takes nothing away."""
    columns = sample_columns()
    before = await backend.stats()
    for _ in range(6):
        await assert_reads(backend, ["a", "b", "c"], columns)
    await assert_holds(backend, before.samples, "reading", before.bytes)


@check("TRQ-025", page=PAGE + "get", using=filled)
async def what_was_read_stays(subject: Subject, backend: TransferQueueBackend) -> None:
    """What a reader holds does not change by what is put or deleted afterwards."""
    columns = sample_columns()
    found = await get(backend, ["a", "b", "c"], list(columns))
    single = await get(backend, ["b"], ["reward"])
    await put(backend, ["a", "b", "c"], sample_columns(seed=9))
    for name, column in columns.items():
        assert_same(column, found[name], name)
    await backend.delete(DeleteRequest(partition="train", keys=("a", "b", "c")))
    await put(backend, ["d", "e", "f"], sample_columns(seed=7))
    for name, column in columns.items():
        assert_same(column, found[name], name)
    assert_same(dense(columns["reward"].values[1:2]), single["reward"], "reward")


@check("TRQ-026", page=PAGE + "errors", using=filled)
async def unknown_rows(subject: Subject, backend: TransferQueueBackend) -> None:
    """Reading a row that is not there is ``queue.unknown-sample`` and names it; nothing is returned in its place."""
    with refused("queue.unknown-sample", "missing-row"):
        await get(backend, ["a", "missing-row", "b"], ["reward"])
    with refused("queue.unknown-sample", "a"):
        await get(backend, ["a"], ["reward"], "other-partition")


@check("TRQ-027", page=PAGE + "errors", using=opened)
async def missing_columns(subject: Subject, backend: TransferQueueBackend) -> None:
    """Reading a column that a row does not have is ``queue.column`` and names the column and the row."""
    await put(backend, ["row-a", "row-b", "row-c"], sample_columns())
    await put(backend, ["row-b"], {"advantages": dense(numbers(0, 1))})
    with refused("queue.column", "never-put"):
        await get(backend, ["row-a"], ["reward", "never-put"])
    with refused("queue.column", "advantages", "row-c"):
        await get(backend, ["row-b", "row-c"], ["advantages"])


@check("TRQ-028", page=PAGE + "errors", using=opened)
async def rows_that_do_not_fit(subject: Subject, backend: TransferQueueBackend) -> None:
    """Rows of one column that differ in dtype, encoding or trailing shape are not read together: ``queue.column``."""
    sorts = {
        "int64": jagged([numbers(0, 4)]),
        "float64": jagged([pattern(torch.float64, 4)]),
        "wide": jagged([numbers(0, 2, 2)]),
        "bytes": jagged([pattern(torch.uint8, 4)]),
        "json": json_texts(["{}"]),
    }
    for key, column in sorts.items():
        await put(backend, [key], {"mixed": column})
    for key, other in (("int64", "float64"), ("int64", "wide"), ("bytes", "json")):
        with refused("queue.column", "mixed"):
            await get(backend, [key, other], ["mixed"])
    for key, column in sorts.items():
        await assert_reads(backend, [key], {"mixed": column})


# -- deleting and counting ---------------------------------------------------------------------------------------------


@check("TRQ-029", page=PAGE + "delete", using=filled)
async def deleted_rows_are_gone(subject: Subject, backend: TransferQueueBackend) -> None:
    """A deleted row is gone with all its columns, also when a row of its key is put again; the others stay."""
    columns = sample_columns()
    await backend.delete(DeleteRequest(partition="train", keys=("b",)))
    with refused("queue.unknown-sample", "b"):
        await get(backend, ["b"], ["reward"])
    await put(backend, ["b"], {"n": dense(numbers(0, 1))})
    with refused("queue.column", "reward"):
        await get(backend, ["b"], ["reward"])
    await assert_reads(backend, ["a", "c"], {"reward": dense(columns["reward"].values[[0, 2]])})


@check("TRQ-030", page=PAGE + "delete", using=filled)
async def deleting_the_unknown(subject: Subject, backend: TransferQueueBackend) -> None:
    """Deleting a row that is not there is no error, and the known rows named beside it are deleted and counted."""
    result = await backend.delete(DeleteRequest(partition="train", keys=("never", "a", "unknown", "c")))
    assert 2 == result.samples, f"two rows were deleted, {result.samples} were reported"
    again = await backend.delete(DeleteRequest(partition="train", keys=("a",)))
    assert 0 == again.samples, "a row was deleted twice"
    await assert_holds(backend, 1, "two of three rows were deleted")


@check("TRQ-031", page=PAGE + "stats", using=opened)
async def stats_count(subject: Subject, backend: TransferQueueBackend) -> None:
    """``stats`` counts the rows and the bytes of values that are held: replaced and deleted ones no longer."""
    columns = sample_columns()
    size = sum(column.values.nbytes for column in columns.values())
    await assert_holds(backend, 0, "nothing was put", 0)
    await put(backend, ["a", "b", "c"], columns)
    await put(backend, ["z"], {"extra": jagged([numbers(0, 10)])}, "other")
    await assert_holds(backend, 4, "four rows were put", size + 80)
    await put(backend, ["z"], {"extra": jagged([numbers(0, 2)])}, "other")
    await assert_holds(backend, 4, "80 bytes were replaced by 16", size + 16)
    await backend.delete(DeleteRequest(partition="other", keys=("z", "y")))
    await assert_holds(backend, 3, "a row was deleted", size)
    await backend.delete(DeleteRequest(partition="train", keys=("a", "b", "c")))
    await assert_holds(backend, 0, "everything was deleted", 0)


@check("TRQ-032", page=PAGE + "stats", using=opened)
async def results_count(subject: Subject, backend: TransferQueueBackend) -> None:
    """Each result counts the bytes of values that it put, freed, wrote or read."""
    columns = sample_columns()
    size = sum(column.values.nbytes for column in columns.values())
    snapshot = SnapshotRequest(folder=str(subject.folder / "snapshot"))
    stored = await put(backend, ["a", "b", "c"], columns)
    assert size == stored.bytes, f"{size} bytes were put, {stored.bytes} reported"
    stored = await put(backend, ["d"], {"extra": jagged([numbers(0, 2)])})
    assert 16 == stored.bytes, f"16 bytes were put, {stored.bytes} reported"
    total = f"4 rows, {size + 16} bytes"
    written = await backend.checkpoint(snapshot)
    assert total == f"{written.samples} rows, {written.bytes} bytes", f"wrote {total}, reported {written}"
    freed = await backend.delete(DeleteRequest(partition="train", keys=("a", "b", "c", "d")))
    assert total == f"{freed.samples} rows, {freed.bytes} bytes", f"deleted {total}, reported {freed}"
    read = await backend.restore(snapshot)
    assert total == f"{read.samples} rows, {read.bytes} bytes", f"restored {total}, reported {read}"
