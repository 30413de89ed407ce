"""Functions that create, read and concatenate columns of samples.

A jagged column keeps its samples contiguously in one tensor with offsets and is never padded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError
from jackfield.sdk.cells import ColumnType, join, offsets_of, split, tensor_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "check_column",
    "column_from_rows",
    "concatenate",
    "dense_column",
    "from_nested",
    "json_column",
    "rows_of",
    "take",
    "to_nested",
]


_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dense_column(values: torch.Tensor) -> Column:
    """Return a column whose samples have one shape: ``values[i]`` of ``[samples, ...]``, any dtype."""
    if values.dim() == 0:
        raise _invalid("a dense column needs one row per index of its first dimension", "[rows, ...]", "a scalar")
    return Column(values=values.detach().cpu().contiguous())


def column_from_rows(rows: Sequence[torch.Tensor]) -> Column:
    """Return a jagged column of rows ``[length, ...]``.

    Lengths may differ and be 0. No rows give an empty float32 column.

    Raises:
        QueueError: ``queue.invalid`` if dtypes or trailing shapes differ, or a row is a scalar.
    """
    import torch

    if not rows:
        return Column(values=torch.empty(0), offsets=torch.zeros(1, dtype=torch.int64))
    first = rows[0]
    for index, row in enumerate(rows):
        if row.dim() == 0 or row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
            expected = f"{first.dtype}, [length, {', '.join(map(str, first.shape[1:]))}]"
            raise _invalid(f"row {index} does not fit into the column", expected, f"{row.dtype}, {list(row.shape)}")
    values = torch.cat([row.detach() for row in rows]).cpu()
    return Column(values=values, offsets=offsets_of(map(len, rows)))


def json_column(values: Sequence[object]) -> Column:
    """Return a column of JSON values, kept as UTF-8 texts.

    Raises:
        QueueError: ``queue.invalid`` for a value that JSON cannot represent, such as NaN and infinity.
    """
    try:
        texts = [_encode(value).encode() for value in values]
    except (TypeError, ValueError) as error:
        raise _invalid(f"a value cannot be written as JSON: {error}", "plain JSON values", error) from error
    content = tensor_of(bytearray().join(texts))
    return Column(values=content, offsets=offsets_of(map(len, texts)), encoding="json")


def from_nested(nested: Any) -> Column:
    """Return a nested tensor (``[samples, j, ...]``, layout ``torch.jagged``) as a jagged column."""
    import torch

    if not nested.is_nested or nested.layout != torch.jagged:
        raise _invalid("the tensor is not nested with layout torch.jagged", "[rows, j, ...]", nested.layout)
    rows = list(nested.unbind())  # a view may have holes
    return column_from_rows(rows) if rows else Column(values=nested.values().cpu()[:0], offsets=offsets_of(()))


def rows_of(column: Column) -> list[Any]:
    """Return the samples: views of the column's values, or the values of a JSON column."""
    if column.encoding == "json":
        return [json.loads(bytes(text)) for text in split(column)[1]]
    values: Any = column.values  # torch has no type for split
    if column.offsets is None:
        return list(values.unbind(0))
    return list(values.split(column.offsets.diff().tolist())) if len(column) else []


def to_nested(column: Column) -> torch.Tensor:
    """Return a jagged column as a nested tensor ``[samples, j, ...]``, without a copy."""
    import torch

    if column.offsets is None or column.encoding != "tensor":
        raise _invalid("only a jagged column of tensors becomes a nested tensor", "jagged", ColumnType.of(column).kind)
    return torch.nested.nested_tensor_from_jagged(column.values, column.offsets)


def take(column: Column, indexes: Sequence[int]) -> Column:
    """Return the samples at ``indexes``, in that order, as a new column."""
    text, contents = split(column)
    if not indexes:
        return attrs.evolve(
            column, values=column.values[:0], offsets=None if column.offsets is None else offsets_of(())
        )
    return join("", [(text, contents[index]) for index in indexes])


def concatenate(columns: Sequence[Column]) -> Column:
    """Return the samples of all columns, in order.

    Raises:
        QueueError: ``queue.column`` if their types differ, or if there is no column.
    """
    if not columns:
        raise QueueError("there is nothing to concatenate", code="queue.column", expected="at least one column")
    found = [split(column) for column in columns]
    cells = [(text, content) for text, contents in found for content in contents]
    return join("", cells) if cells else columns[0]


def check_column(name: str, column: Column, rows: int) -> list[int]:
    """Check that a column keeps the contract of :class:`~jackfield.abc.transfer_queue.Column`.

    Returns:
        The bytes of each sample's values.

    Raises:
        QueueError: ``queue.invalid``, which names the column, if it does not.
    """
    import torch

    where = f"column {name!r}"
    if not isinstance(column, Column):
        raise _invalid("not a Column", "a jackfield.abc.transfer_queue.Column", type(column).__name__, where)
    values, offsets, is_json = column.values, column.offsets, column.encoding == "json"
    if not values.is_cpu or not values.is_contiguous() or values.dim() == 0:
        expected, found = "[rows, ...], contiguous, on the CPU", f"{list(values.shape)}, {values.device}"
        raise _invalid("the values are in the wrong place", expected, found, where)
    if offsets is not None and (offsets.dtype != torch.int64 or offsets.dim() != 1):
        raise _invalid("offsets have to be int64 [rows + 1]", "int64", offsets.dtype, where)
    if len(column) != rows:
        raise _invalid(f"{where} has {len(column)} rows", f"{rows}, one per key", len(column), where)
    if is_json and (offsets is None or values.dtype != torch.uint8 or values.dim() != 1):
        raise _invalid("JSON texts are one-dimensional uint8 with offsets", "uint8", values.dtype, where)
    unit = values.element_size() * math.prod(values.shape[1:])
    if offsets is None:
        return [unit] * rows
    bounds, size = offsets.tolist(), values.shape[0]
    if bounds[0] != 0 or bounds[-1] != size or bounds != sorted(bounds):
        message = "offsets go from 0 to the number of values and never fall"
        raise _invalid(message, f"0 … {size}", bounds[:8], where)
    return [(end - start) * unit for start, end in pairwise(bounds)]


def _invalid(message: str, expected: object, found: object, where: object = None) -> QueueError:
    return QueueError(message, code="queue.invalid", where=where, expected=expected, found=found)
