"""Checks of TransferQueue backends: what is put."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import torch

from jackfield.abc.transfer_queue import DeleteRequest, TransferQueueBackend
from jackfield_conformance.registry import check
from jackfield_conformance.support.transfer_queue import (
    PAGE,
    assert_holds,
    assert_reads,
    assert_same,
    dense,
    dtypes,
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
    """With zeros of both signs, infinities and a quiet NaN, where the dtype has them."""
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
    keys = ["a", "b", "c", "d"]
    await put(backend, keys, columns)
    found = await get(backend, keys, list(columns))
    for name, column in columns.items():
        assert_same(column, found[name], name)


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
    found = await get(backend, ["a", "b", "c", "d"], list(columns))
    for name, column in columns.items():
        assert_same(column, found[name], name)
        single = await get(backend, ["c"], [name])
        assert_same(dense(column.values[2:3]), single[name], f"the third row of {name}")


@check("TRQ-013", page=PAGE + "values", using=opened)
async def nothing_but_empty_rows(subject: Subject, backend: TransferQueueBackend) -> None:
    """A column all of whose rows are empty comes back with its dtype and trailing shape."""
    columns = {
        "tokens": jagged([numbers(0, 0)] * 3),
        "images": jagged([pattern(torch.uint8, 0, 3, 2)] * 3),
        "no_width": dense(pattern(torch.float32, 3, 0)),
    }
    await put(backend, ["a", "b", "c"], columns)
    found = await get(backend, ["a", "b", "c"], list(columns))
    for name, column in columns.items():
        assert_same(column, found[name], name)


@check("TRQ-014", page=PAGE + "values", using=opened)
async def json_columns(subject: Subject, backend: TransferQueueBackend) -> None:
    """JSON texts come back byte for byte and marked as JSON; plain bytes beside them are not."""
    texts = ['{"b": 1,  "a": [1.0, 2e-300]}', '"\u00e4\u6f22\\u0000\U0001f3b2"', "null", '{"key": 1, "key": 2}']
    column, plain = json_texts(texts), jagged([pattern(torch.uint8, 4, seed=row) for row in range(4)])
    await put(backend, ["a", "b", "c", "d"], {"fields": column, "bytes": plain})
    found = await get(backend, ["a", "b", "c", "d"], ["fields", "bytes"])
    assert_same(column, found["fields"], "fields")
    assert_same(plain, found["bytes"], "bytes")


@check("TRQ-015", page=PAGE + "values", using=opened)
async def large_values(subject: Subject, backend: TransferQueueBackend) -> None:
    """A row of megabytes comes back whole, and so does a small one beside it."""
    column = jagged([pattern(torch.float32, _LARGE), pattern(torch.float32, 3, seed=1)])
    await put(backend, ["large", "small"], {"values": column})
    await assert_reads(backend, ["large", "small"], {"values": column})


# -- writing -----------------------------------------------------------------------------------------------------------


@check("TRQ-016", page=PAGE + "put", using=filled)
async def other_columns_stay(subject: Subject, backend: TransferQueueBackend) -> None:
    """Putting a column keeps the other columns of the same rows, and the same column of other rows."""
    columns = sample_columns()
    await put(backend, ["b", "d"], {"advantages": dense(numbers(0, 2))})
    await assert_reads(backend, ["a", "b", "c"], columns)
    await assert_reads(backend, ["b", "d"], {"advantages": dense(numbers(0, 2))})


@check("TRQ-017", page=PAGE + "put", using=opened)
async def a_second_put_replaces(subject: Subject, backend: TransferQueueBackend) -> None:
    """Putting a column again replaces it for the rows that are named, whatever its length, dtype or sort."""
    await put(backend, ["a", "b", "c"], {"column": jagged([numbers(0, 3), numbers(3, 3), numbers(6, 3)])})
    await put(backend, ["c", "a"], {"column": jagged([numbers(90, 1), numbers(50, 5)])})
    expected = jagged([numbers(50, 5), numbers(3, 3), numbers(90, 1)])
    await assert_reads(backend, ["a", "b", "c"], {"column": expected})
    other = dense(pattern(torch.float16, 3, 2))
    await put(backend, ["a", "b", "c"], {"column": other})
    await assert_reads(backend, ["a", "b", "c"], {"column": other})


@check("TRQ-018", page=PAGE + "put", using=opened)
async def what_is_put_is_copied(subject: Subject, backend: TransferQueueBackend) -> None:
    """The backend copies what it keeps: the caller may change its tensors once put has returned."""
    values, row = numbers(0, 4, 3), numbers(0, 6)
    offsets = torch.tensor([0, 1, 3, 3, 6])
    expected = dense(values.clone()), jagged([numbers(0, 1), numbers(1, 2), numbers(3, 0), numbers(3, 3)])
    column = jagged([row])
    column = type(column)(values=row, offsets=offsets)
    await put(backend, ["a", "b", "c", "d"], {"dense": dense(values), "jagged": column})
    await put(backend, ["one"], {"jagged": jagged([row])})
    single = type(column)(values=row, offsets=torch.tensor([0, 6]))
    await put(backend, ["other"], {"jagged": single})
    values.fill_(-1)
    row.fill_(-1)
    offsets.fill_(0)
    found = await get(backend, ["a", "b", "c", "d"], ["dense", "jagged"])
    assert_same(expected[0], found["dense"], "dense")
    assert_same(expected[1], found["jagged"], "jagged")
    alone = await get(backend, ["one", "other"], ["jagged"])
    assert_same(jagged([numbers(0, 6), numbers(0, 6)]), alone["jagged"], "a single row")


@check("TRQ-019", page=PAGE + "put", using=opened)
async def partitions_are_separate(subject: Subject, backend: TransferQueueBackend) -> None:
    """Rows of the same key in two partitions have nothing to do with each other."""
    first, second = sample_columns(seed=1), sample_columns(seed=2)
    keys = ["a", "b", "c"]
    await put(backend, keys, first, "train")
    await put(backend, keys, second, "evaluation")
    await backend.delete(DeleteRequest(partition="evaluation", keys=("c",)))
    await assert_reads(backend, keys, first, "train")
    with refused("queue.unknown-sample", "c"):
        await get(backend, ["c"], ["reward"], "evaluation")
    other = await get(backend, ["a", "b"], ["reward"], "evaluation")
    assert_same(dense(second["reward"].values[:2]), other["reward"], "reward")


@check("TRQ-020", page=PAGE + "put", using=opened)
async def names_of_any_text(subject: Subject, backend: TransferQueueBackend) -> None:
    """Partitions, keys and columns may have any text for a name, and different names are different."""
    names = ["a", "A", "a/b", "a:b", "../a", "a b", "a%2Fb", "\u00e4", "\u6f22", "%", "'", "a.b", "x" * 120]
    names += ["a\\b", "a|b", '"', "a\nb", "*", "."]
    names.sort()
    await put(backend, names, {name: dense(numbers(n * 100, len(names))) for n, name in enumerate(names)})
    found = await get(backend, names, names)
    for n, name in enumerate(names):
        assert_same(dense(numbers(n * 100, len(names))), found[name], f"column {name!r}")
    pairs = [("p", "q/r"), ("p/q", "r"), ("p:q", "r"), ("p", "q:r"), ("p", "q|r"), ("p|q", "r"), ("P", "q/r")]
    for n, (partition, key) in enumerate(pairs):
        await put(backend, [key], {"column": dense(numbers(n, 1))}, partition)
    for n, (partition, key) in enumerate(pairs):
        column = (await get(backend, [key], ["column"], partition))["column"]
        assert_same(dense(numbers(n, 1)), column, f"row {key!r} of partition {partition!r}")


@check("TRQ-021", page=PAGE + "put", using=opened)
async def many_producers(subject: Subject, backend: TransferQueueBackend) -> None:
    """Many tasks may put and read at once, even columns of the same rows, and nothing is lost."""
    keys = [f"row-{n:02}" for n in range(24)]

    async def produce(number: int) -> None:
        for first in range(0, len(keys), 4):
            part = keys[first : first + 4]
            column = jagged([numbers(1000 * number + 10 * first + n, n % 3) for n in range(len(part))])
            await put(backend, part, {f"column-{number}": column})
            assert_same(column, (await get(backend, part, [f"column-{number}"]))[f"column-{number}"], "column")

    await asyncio.gather(*(produce(number) for number in range(6)))
    found = await get(backend, keys, [f"column-{number}" for number in range(6)])
    for number in range(6):
        rows = [numbers(1000 * number + 10 * first + n, n % 3) for first in range(0, 24, 4) for n in range(4)]
        assert_same(jagged(rows), found[f"column-{number}"], f"column-{number}")
    await assert_holds(backend, len(keys), "many producers have put them")
