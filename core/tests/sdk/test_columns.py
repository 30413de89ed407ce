"""Columns keep every bit of every dtype and shape."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError
from jackfield.sdk.cells import (
    check_column,
    column_from_rows,
    column_of,
    dense_column,
    from_nested,
    join,
    json_column,
    layout,
    rows_of,
    split,
    tensor_of,
    to_nested,
)
from jackfield_testing import refused

torch = pytest.importorskip("torch")

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> tuple[object, ...]:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return tensor.dtype, tuple(tensor.shape), raw


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Random bytes (NaN payloads included); for bool, random 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.empty(0, dtype=dtype).element_size()
    count = size * torch.Size(shape).numel()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


@st.composite
def rows(draw: st.DrawFn, minimum: int = 0) -> list[torch.Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    trailing = tuple(draw(st.lists(st.integers(0, 3), max_size=2)))
    lengths = draw(st.lists(st.integers(0, 5), min_size=minimum, max_size=6))
    seed = draw(st.integers(0, 2**31))
    return [random_tensor(dtype, (length, *trailing), seed + index) for index, length in enumerate(lengths)]


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
NUMBERS = st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None)
@given(rows())
def test_jagged_rows_come_back_bit_for_bit(given_rows: list[torch.Tensor]) -> None:
    column = column_from_rows(given_rows)
    assert [row.nbytes for row in given_rows] == check_column("c", column, len(given_rows))
    assert [bits(row) for row in given_rows] == [bits(row) for row in rows_of(column)]


@settings(deadline=None)
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 3), min_size=1, max_size=3), st.integers(0, 2**31))
def test_dense_rows_come_back_bit_for_bit(dtype: torch.dtype, shape: list[int], seed: int) -> None:
    values = random_tensor(dtype, tuple(shape), seed)
    column = dense_column(values)
    assert [row.nbytes for row in values] == check_column("c", column, shape[0])
    assert [bits(row) for row in values] == [bits(row) for row in rows_of(column)]


@settings(deadline=None)
@given(st.lists(JSON, max_size=5))
def test_json_values_come_back(values: list[object]) -> None:
    column = json_column(values)
    check_column("c", column, len(values))
    assert json.loads(json.dumps(values)) == rows_of(column)


def joined(columns: list[Column]) -> Column:
    return join("c", [(text, content) for text, contents in map(split, columns) for content in contents])


@settings(deadline=None)
@given(rows(minimum=1), st.data())
def test_join_undoes_a_split(given_rows: list[torch.Tensor], data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(given_rows)))
    parts = [column_from_rows(given_rows[:cut]), column_from_rows(given_rows[cut:])]
    assert [bits(row) for row in given_rows] == [bits(row) for row in rows_of(joined(parts))]


@settings(deadline=None)  # torch imports much at its first nested tensor
@given(rows(minimum=1))
def test_nested_and_back(given_rows: list[torch.Tensor]) -> None:
    nested = to_nested(column_from_rows(given_rows))
    assert len(given_rows) == nested.shape[0]
    assert [bits(row) for row in given_rows] == [bits(row) for row in rows_of(from_nested(nested))]


def test_a_nested_view_with_holes_becomes_a_column_without() -> None:
    dense = torch.arange(12).reshape(3, 4)
    nested = torch.nested.narrow(dense, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 2]), layout=torch.jagged)
    assert [[0, 1], [], [10, 11]] == [row.tolist() for row in rows_of(from_nested(nested))]


def test_a_column_does_not_carry_gradients() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not column_from_rows([weight * 2]).values.requires_grad


def test_numpy_arrays_of_json_are_refused_and_nan_too() -> None:
    for value in (float("nan"), torch.zeros(1), object()):
        with refused("queue.invalid"):
            json_column([value])


@pytest.mark.parametrize(
    ("values", "offsets", "found"),
    [
        (torch.arange(3), torch.tensor([0, 2]), "2"),  # a row too few
        (torch.arange(3), torch.tensor([0, 1, 2]), "go from 0"),
        (torch.arange(3), torch.tensor([1, 2, 3]), "go from 0"),
        (torch.arange(3), torch.tensor([0, 4, 3]), "never fall"),
        (torch.arange(3), torch.tensor([0, 1, 3], dtype=torch.int32), "int64"),
        (torch.arange(4).reshape(2, 2).T, None, "contiguous"),
    ],
)
def test_a_malformed_column_is_refused_by_name(values: torch.Tensor, offsets: torch.Tensor | None, found: str) -> None:
    with pytest.raises(QueueError) as caught:
        check_column("response_ids", Column(values=values, offsets=offsets), 2)
    assert "response_ids" in str(caught.value)
    assert found in str(caught.value)


@settings(deadline=None)
@given(rows(minimum=1), st.booleans())
def test_a_column_comes_back_from_its_layout(given_rows: list[torch.Tensor], dense: bool) -> None:
    """One call for the whole column, and none for a sample."""
    given_rows = [given_rows[0]] * len(given_rows) if dense else given_rows
    column = dense_column(torch.stack(given_rows)) if dense else column_from_rows(given_rows)
    text, content, bounds = layout(column)
    sizes = [end - start for start, end in pairwise(bounds)]
    found = column_of("c", [text], sizes, tensor_of(bytearray(content)))
    assert dense == (found.offsets is None)
    assert [bits(row) for row in given_rows] == [bits(row) for row in rows_of(found)]


@pytest.mark.parametrize(
    ("column", "sizes"),
    [
        (dense_column(torch.zeros(2, 3)), [12, 8]),  # dense samples have one size
        (column_from_rows([torch.zeros(2), torch.zeros(4)]), [4, 18]),  # float32 has 4 bytes
        (column_from_rows([torch.zeros(2, 0), torch.zeros(4, 0)]), [8, 12]),  # lengths have 8
    ],
)
def test_samples_of_other_sizes_than_their_type_has_are_refused(column: Column, sizes: list[int]) -> None:
    text, content, _ = layout(column)
    with refused("queue.store", f"{sizes[-1]} bytes"):
        column_of("c", [text], sizes, tensor_of(bytearray(content)))


def test_columns_that_differ_cannot_be_joined() -> None:
    first = column_from_rows([torch.zeros(2)])
    for other in (
        column_from_rows([torch.zeros(2, dtype=torch.int64)]),
        dense_column(torch.zeros(1)),
        json_column([1]),
    ):
        with pytest.raises(QueueError) as caught:
            joined([first, other])
        assert caught.value.code == "queue.column"
    with refused("queue.invalid", "row 1"):
        column_from_rows([torch.zeros(2), torch.zeros(2, 2)])
