"""Checks of queue backends: put, get, delete and counts."""

from __future__ import annotations

import asyncio

import torch

from jackfield.abc.transfer_queue import Column, DeleteRequest, SnapshotRequest, TransferQueueBackend
from jackfield.sdk.cells import column_from_rows as jagged
from jackfield.sdk.cells import dense_column as dense
from jackfield_conformance.registry import Subject, check
from jackfield_conformance.support.transfer_queue import (
    PAGE,
    assert_holds,
    assert_reads,
    assert_same,
    dtypes,
    filled,
    get,
    json_texts,
    numbers,
    opened,
    pattern,
    put,
    refused,
    sample_columns,
)

_LARGE = 1 << 19  #: elements


@check("TRQ-010", page=PAGE + "values", using=opened)
async def every_dtype(subject: Subject, backend: TransferQueueBackend) -> None:
    """Values of every dtype come back bit for bit.

    NaNs keep their payloads, zeros their signs, integers of 64 bits their last digits.
    """
    for seed, dtype in enumerate(dtypes()):
        name = str(dtype).removeprefix("torch.")
        column = dense(_specials(pattern(dtype, 4, 24, seed=seed)))
        await put(backend, [f"{name}-{row}" for row in range(4)], {name: column})
        await assert_reads(backend, [f"{name}-{row}" for row in range(4)], {name: column})


def _specials(values: torch.Tensor) -> torch.Tensor:
    """Write zeros of both signs, infinities and a quiet NaN into a tensor, if its dtype has them."""
    if values.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        values[0, :5] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")], dtype=values.dtype)
    if values.dtype == torch.int64:
        values[0, :4] = torch.tensor([(1 << 63) - 1, -(1 << 63), (1 << 53) + 1, -1])
    return values


@check("TRQ-011", page=PAGE + "values", using=opened)
async def jagged_rows(subject: Subject, backend: TransferQueueBackend) -> None:
    """Jagged rows come back with their lengths, also rows of length 0 and rows with trailing dimensions."""
    columns = {
        "mixed": jagged([numbers(0, 3), numbers(3, 0), numbers(3, 5), numbers(8, 1)]),
        "empty_ends": jagged([numbers(0, 0), numbers(0, 2), numbers(2, 2), numbers(4, 0)]),
        "trailing": jagged([numbers(0, length, 2, 3) for length in (1, 0, 4, 2)]),
        "wide": jagged([pattern(torch.bfloat16, length, 7, seed=length) for length in (2, 9, 0, 1)]),
    }
    await put(backend, ["a", "b", "c", "d"], columns)
    await assert_reads(backend, ["a", "b", "c", "d"], columns)


@check("TRQ-012", page=PAGE + "values", using=opened)
async def dense_rows(subject: Subject, backend: TransferQueueBackend) -> None:
    """Dense rows come back dense: scalars, vectors and matrices, one row or many."""
    columns = {
        "scalar": dense(numbers(0, 4)),
        "vector": dense(numbers(0, 4, 3)),
        "matrix": dense(pattern(torch.float16, 4, 2, 5)),
        "one_element": dense(numbers(7, 4, 1)),
    }
    await put(backend, ["a", "b", "c", "d"], columns)
    await assert_reads(backend, ["a", "b", "c", "d"], columns)
    await assert_reads(backend, ["c"], {name: dense(column.values[2:3]) for name, column in columns.items()})


@check("TRQ-013", page=PAGE + "values", using=opened)
async def nothing_but_empty_rows(subject: Subject, backend: TransferQueueBackend) -> None:
    """A column with only empty rows comes back with its dtype and trailing shape."""
    columns = {
        "tokens": jagged([numbers(0, 0)] * 3),
        "images": jagged([pattern(torch.uint8, 0, 3, 2)] * 3),
        "no_width": dense(pattern(torch.float32, 3, 0)),
    }
    await put(backend, ["a", "b", "c"], columns)
    await assert_reads(backend, ["a", "b", "c"], columns)


@check("TRQ-014", page=PAGE + "values", using=opened)
async def json_columns(subject: Subject, backend: TransferQueueBackend) -> None:
    """JSON texts come back byte for byte and marked as JSON; plain bytes beside them are not marked."""
    texts = ['{"b": 1,  "a": [1.0, 2e-300]}', '"\u00e4\u6f22\\u0000\U0001f3b2"', "null", '{"key": 1, "key": 2}']
    plain = jagged([pattern(torch.uint8, 4, seed=row) for row in range(4)])
    columns = {"fields": json_texts(texts), "bytes": plain}
    await put(backend, ["a", "b", "c", "d"], columns)
    await assert_reads(backend, ["a", "b", "c", "d"], columns)


@check("TRQ-015", page=PAGE + "values", using=opened)
async def large_values(subject: Subject, backend: TransferQueueBackend) -> None:
    """A row of megabytes comes back whole, and so does a small row beside it."""
    column = jagged([pattern(torch.float32, _LARGE), pattern(torch.float32, 3, seed=1)])
    await put(backend, ["large", "small"], {"values": column})
    await assert_reads(backend, ["large", "small"], {"values": column})


@check("TRQ-016", page=PAGE + "put", using=filled)
async def other_columns_stay(subject: Subject, backend: TransferQueueBackend) -> None:
    """Putting a column keeps the other columns of the same rows, and the same column of other rows."""
    columns = sample_columns()
    await put(backend, ["b", "d"], {"advantages": dense(numbers(0, 2))})
    await assert_reads(backend, ["a", "b", "c"], columns)
    await assert_reads(backend, ["b", "d"], {"advantages": dense(numbers(0, 2))})


@check("TRQ-017", page=PAGE + "put", using=opened)
async def a_second_put_replaces(subject: Subject, backend: TransferQueueBackend) -> None:
    """Putting a column again replaces it for the given rows, whatever its length, dtype or kind."""
    await put(backend, ["a", "b", "c"], {"column": jagged([numbers(0, 3), numbers(3, 3), numbers(6, 3)])})
    await put(backend, ["c", "a"], {"column": jagged([numbers(90, 1), numbers(50, 5)])})
    expected = jagged([numbers(50, 5), numbers(3, 3), numbers(90, 1)])
    await assert_reads(backend, ["a", "b", "c"], {"column": expected})
    other = dense(pattern(torch.float16, 3, 2))
    await put(backend, ["a", "b", "c"], {"column": other})
    await assert_reads(backend, ["a", "b", "c"], {"column": other})


@check("TRQ-018", page=PAGE + "put", using=opened)
async def what_is_put_is_copied(subject: Subject, backend: TransferQueueBackend) -> None:
    """The backend copies values: the caller may change its tensors once ``put`` has returned."""
    values, row = numbers(0, 4, 3), numbers(0, 6)
    offsets = torch.tensor([0, 1, 3, 3, 6])
    parts = jagged([numbers(0, 1), numbers(1, 2), numbers(3, 0), numbers(3, 3)])
    expected = {"dense": dense(values.clone()), "jagged": parts}
    column = Column(values=row, offsets=offsets)
    await put(backend, ["a", "b", "c", "d"], {"dense": dense(values), "jagged": column})
    await put(backend, ["one"], {"jagged": jagged([row])})
    await put(backend, ["other"], {"jagged": Column(values=row, offsets=torch.tensor([0, 6]))})
    values.fill_(-1)
    row.fill_(-1)
    offsets.fill_(0)
    await assert_reads(backend, ["a", "b", "c", "d"], expected)
    await assert_reads(backend, ["one", "other"], {"jagged": jagged([numbers(0, 6), numbers(0, 6)])})


@check("TRQ-019", page=PAGE + "put", using=opened)
async def partitions_are_separate(subject: Subject, backend: TransferQueueBackend) -> None:
    """Rows with the same key in two partitions are independent."""
    first, second = sample_columns(seed=1), sample_columns(seed=2)
    keys = ["a", "b", "c"]
    await put(backend, keys, first, "train")
    await put(backend, keys, second, "evaluation")
    await backend.delete(DeleteRequest(partition="evaluation", keys=("c",)))
    await assert_reads(backend, keys, first, "train")
    with refused("queue.unknown-sample", "c"):
        await get(backend, ["c"], ["reward"], "evaluation")
    await assert_reads(backend, ["a", "b"], {"reward": dense(second["reward"].values[:2])}, "evaluation")


@check("TRQ-020", page=PAGE + "put", using=opened)
async def names_of_any_text(subject: Subject, backend: TransferQueueBackend) -> None:
    """Partitions, keys and columns may have any text as name, and different names are different."""
    names = ["a", "A", "a/b", "a:b", "../a", "a b", "a%2Fb", "\u00e4", "\u6f22", "%", "'", "a.b", "x" * 120]
    names += ["a\\b", "a|b", '"', "a\nb", "*", "."]
    names.sort()
    columns = {name: dense(numbers(n * 100, len(names))) for n, name in enumerate(names)}
    await put(backend, names, columns)
    await assert_reads(backend, names, columns)
    pairs = [("p", "q/r"), ("p/q", "r"), ("p:q", "r"), ("p", "q:r"), ("p", "q|r"), ("p|q", "r"), ("P", "q/r")]
    for n, (partition, key) in enumerate(pairs):
        await put(backend, [key], {"column": dense(numbers(n, 1))}, partition)
    for n, (partition, key) in enumerate(pairs):
        await assert_reads(backend, [key], {"column": dense(numbers(n, 1))}, partition)


@check("TRQ-021", page=PAGE + "put", using=opened)
async def many_producers(subject: Subject, backend: TransferQueueBackend) -> None:
    """Many tasks may put and read at once, even columns of the same rows, and nothing is lost."""
    keys = [f"row-{n:02}" for n in range(24)]

    async def produce(number: int) -> None:
        for first in range(0, len(keys), 4):
            part = keys[first : first + 4]
            column = jagged([numbers(1000 * number + 10 * first + n, n % 3) for n in range(len(part))])
            await put(backend, part, {f"column-{number}": column})
            await assert_reads(backend, part, {f"column-{number}": column})

    await asyncio.gather(*(produce(number) for number in range(6)))
    for number in range(6):
        rows = [numbers(1000 * number + 10 * first + n, n % 3) for first in range(0, 24, 4) for n in range(4)]
        await assert_reads(backend, keys, {f"column-{number}": jagged(rows)})
    await assert_holds(backend, len(keys), "many producers have put them")


@check("TRQ-022", page=PAGE + "get", using=opened)
async def order_of_keys(subject: Subject, backend: TransferQueueBackend) -> None:
    """A read returns rows in the order of its keys, whatever the order in which they were put."""
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
    """A read can be repeated, because it removes nothing."""
    columns = sample_columns()
    before = await backend.stats()
    for _ in range(6):
        await assert_reads(backend, ["a", "b", "c"], columns)
    await assert_holds(backend, before.samples, "reading", before.bytes)


@check("TRQ-025", page=PAGE + "get", using=filled)
async def what_was_read_stays(subject: Subject, backend: TransferQueueBackend) -> None:
    """Values that a reader holds do not change when rows are put or deleted afterwards."""
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
    """Reading an unknown row raises ``queue.unknown-sample``, which names it; nothing is returned in its place."""
    with refused("queue.unknown-sample", "missing-row"):
        await get(backend, ["a", "missing-row", "b"], ["reward"])
    with refused("queue.unknown-sample", "a"):
        await get(backend, ["a"], ["reward"], "other-partition")


@check("TRQ-027", page=PAGE + "errors", using=opened)
async def missing_columns(subject: Subject, backend: TransferQueueBackend) -> None:
    """Reading a column that a row lacks raises ``queue.column``, which names the column and the row."""
    await put(backend, ["row-a", "row-b", "row-c"], sample_columns())
    await put(backend, ["row-b"], {"advantages": dense(numbers(0, 1))})
    with refused("queue.column", "never-put"):
        await get(backend, ["row-a"], ["reward", "never-put"])
    with refused("queue.column", "advantages", "row-c"):
        await get(backend, ["row-b", "row-c"], ["advantages"])


@check("TRQ-028", page=PAGE + "errors", using=opened)
async def rows_that_do_not_fit(subject: Subject, backend: TransferQueueBackend) -> None:
    """Reading rows of a column that differ in dtype, encoding or trailing shape together raises ``queue.column``."""
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


@check("TRQ-029", page=PAGE + "delete", using=filled)
async def deleted_rows_are_gone(subject: Subject, backend: TransferQueueBackend) -> None:
    """A deleted row is gone with all its columns, also after a put under the same key; other rows stay."""
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
    """Deleting an unknown row is no error, and the known rows of the same call are deleted and counted."""
    result = await backend.delete(DeleteRequest(partition="train", keys=("never", "a", "unknown", "c")))
    assert 2 == result.samples, f"two rows were deleted, {result.samples} were reported"
    again = await backend.delete(DeleteRequest(partition="train", keys=("a",)))
    assert 0 == again.samples, "a row was deleted twice"
    await assert_holds(backend, 1, "two of three rows were deleted")


@check("TRQ-031", page=PAGE + "stats", using=opened)
async def stats_count(subject: Subject, backend: TransferQueueBackend) -> None:
    """``stats`` counts the rows and the bytes of values that are held, without replaced and deleted ones."""
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
