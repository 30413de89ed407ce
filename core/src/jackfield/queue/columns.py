"""Columns of rows: made, taken apart and put together.

A jagged column keeps its rows back to back in one tensor with offsets, and is never padded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from jackfield.abc.transfer_queue import Column
from jackfield.errors import QueueError

if TYPE_CHECKING:
    import torch

__all__ = [
    "byte_size",
    "check_column",
    "column_from_rows",
    "concatenate",
    "dense_column",
    "from_nested",
    "json_column",
    "row_bytes",
    "rows_of",
    "split_rows",
    "take",
    "to_nested",
]


def dense_column(values: torch.Tensor) -> Column:
    """A column of rows of one shape.

    Args:
        values: ``[rows, ...]``, any dtype.
    """
    if values.dim() == 0:
        raise _invalid("a dense column needs one row per index of its first dimension", "[rows, ...]", "a scalar")
    return Column(values=_plain(values))


def column_from_rows(rows: Sequence[torch.Tensor]) -> Column:
    """A jagged column.

    Args:
        rows: each ``[length, ...]``; lengths may differ and be 0, dtypes and trailing shapes may not. No rows at all
            give an empty float32 column.

    Raises:
        QueueError: ``queue.invalid`` where dtypes or trailing shapes differ, or a row is a scalar.
    """
    import torch

    if not rows:
        return Column(values=torch.empty(0), offsets=torch.zeros(1, dtype=torch.int64))
    first = rows[0]
    for index, row in enumerate(rows):
        if row.dim() == 0 or row.dtype != first.dtype or row.shape[1:] != first.shape[1:]:
            raise _invalid(
                f"row {index} does not fit into the column",
                f"{first.dtype}, [length, {', '.join(map(str, first.shape[1:]))}]",
                f"{row.dtype}, {list(row.shape)}",
            )
    values = torch.cat([row.detach() for row in rows])
    return Column(values=_plain(values), offsets=_offsets([row.shape[0] for row in rows]))


def json_column(values: Sequence[object]) -> Column:
    """A column of JSON values, kept as UTF-8 texts.

    Raises:
        QueueError: ``queue.invalid`` for a value that JSON cannot hold; NaN and infinity are among them.
    """
    import torch

    try:
        texts = [_json(value).encode() for value in values]
    except (TypeError, ValueError) as error:
        raise _invalid(f"a value cannot be written as JSON: {error}", "plain JSON values", error) from error
    joined = bytearray(b"".join(texts))
    content = torch.frombuffer(joined, dtype=torch.uint8) if joined else torch.empty(0, dtype=torch.uint8)
    return Column(values=content, offsets=_offsets([len(text) for text in texts]), encoding="json")


def rows_of(column: Column) -> list[Any]:
    """The rows: tensors (views of the column's values), or the decoded values of a JSON column."""
    if column.offsets is not None and column.encoding == "json":
        content, bounds = column.values.numpy().tobytes(), column.offsets.tolist()
        return [json.loads(content[start:end]) for start, end in pairwise(bounds)]
    return list(split_rows(column))


def take(column: Column, indexes: Sequence[int]) -> Column:
    """The rows at ``indexes``, in that order, as a column of their own."""
    import torch

    if column.offsets is None:
        return Column(values=column.values[torch.tensor(indexes, dtype=torch.int64)], encoding=column.encoding)
    rows = split_rows(column)
    chosen = [rows[index] for index in indexes]
    values = torch.cat(chosen) if chosen else column.values[:0]
    return Column(values=values, offsets=_offsets([len(row) for row in chosen]), encoding=column.encoding)


def concatenate(columns: Sequence[Column]) -> Column:
    """The rows of all columns, in order.

    Raises:
        QueueError: ``queue.column`` where they differ in dtype, encoding, trailing shape or being jagged; also without
            any column.
    """
    import torch

    if not columns:
        raise QueueError("there is nothing to concatenate", code="queue.column", expected="at least one column")
    kinds = {(_kind(column), column.values.dtype, tuple(column.values.shape[1:])) for column in columns}
    if len(kinds) > 1:
        raise QueueError(
            "columns do not fit together",
            code="queue.column",
            expected="one dtype, encoding and trailing shape, all jagged or all dense",
            found=sorted(map(str, kinds)),
        )
    values = torch.cat([column.values for column in columns])
    if columns[0].offsets is None:
        return Column(values=values)
    lengths = [length for column in columns for length in _lengths(column)]
    return Column(values=values, offsets=_offsets(lengths), encoding=columns[0].encoding)


def to_nested(column: Column) -> torch.Tensor:
    """A jagged tensor column as ``torch.nested`` ``[rows, j, ...]`` (layout ``torch.jagged``); no bytes are copied."""
    import torch

    if column.offsets is None or column.encoding != "tensor":
        raise _invalid("only a jagged column of tensors becomes a nested tensor", "jagged", _kind(column))
    return torch.nested.nested_tensor_from_jagged(column.values, column.offsets)


def from_nested(nested: Any) -> Column:
    """A nested tensor (``[rows, j, ...]``, layout ``torch.jagged``) as a jagged column."""
    import torch

    if not nested.is_nested or nested.layout != torch.jagged:
        raise _invalid("the tensor is not nested with layout torch.jagged", "[rows, j, ...]", nested.layout)
    offsets, lengths, values = nested.offsets(), nested.lengths(), nested.values()
    if lengths is not None or (len(offsets) and (int(offsets[0]) != 0 or int(offsets[-1]) != len(values))):
        return column_from_rows(list(nested.unbind()))  # a view with holes
    return Column(values=_plain(values), offsets=offsets.to("cpu", torch.int64))


def byte_size(column: Column) -> int:
    """Bytes of the column's values."""
    return column.values.numel() * column.values.element_size()


def row_bytes(column: Column) -> list[int]:
    """Bytes of the values of each row."""
    if column.offsets is None:
        return [_unit(column.values)] * len(column.values)
    unit = _unit(column.values)
    return [length * unit for length in _lengths(column)]


def check_column(name: str, column: Column, rows: int) -> list[int]:
    """Refuse a column that breaks the contract of :class:`~jackfield.abc.transfer_queue.Column`.

    Returns:
        the bytes of each row's values (see :func:`row_bytes`).

    Raises:
        QueueError: ``queue.invalid``, naming the column.
    """
    import torch

    where = f"column {name!r}"
    if not isinstance(column, Column):
        raise _invalid("not a Column", "a jackfield.abc.transfer_queue.Column", type(column).__name__, where)
    values, offsets = column.values, column.offsets
    if not values.is_cpu or not values.is_contiguous() or values.dim() == 0:
        expected = "[rows, ...], contiguous, on the CPU"
        raise _invalid("the values are in the wrong place", expected, f"{list(values.shape)}, {values.device}", where)
    size = values.shape[0]
    if offsets is None:
        if size != rows:
            raise _invalid(f"{where} has {size} rows", f"{rows}, one per key", size, where)
        if column.encoding == "json":
            raise _invalid("JSON texts have to be jagged", "offsets", None, where)
        return row_bytes(column)
    if offsets.dtype != torch.int64 or offsets.dim() != 1:
        raise _invalid("offsets have to be int64 [rows + 1]", "int64", offsets.dtype, where)
    bounds = offsets.tolist()
    if len(bounds) != rows + 1:
        raise _invalid(f"{where} has {len(bounds) - 1} rows", f"{rows}, one per key", len(bounds) - 1, where)
    lengths = _differences(bounds)
    if bounds[0] != 0 or bounds[-1] != size or min(lengths, default=0) < 0:
        raise _invalid("offsets go from 0 to the number of values and never fall", f"0 … {size}", bounds[:8], where)
    if column.encoding == "json" and (values.dtype != torch.uint8 or values.dim() != 1):
        raise _invalid("JSON texts are one-dimensional uint8", "uint8", values.dtype, where)
    unit = _unit(values)
    return [length * unit for length in lengths]


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values.detach().cpu().contiguous()


def _offsets(lengths: Sequence[int]) -> torch.Tensor:
    import torch

    bounds = [0]
    for length in lengths:
        bounds.append(bounds[-1] + length)
    return torch.tensor(bounds, dtype=torch.int64)


def _lengths(column: Column) -> list[int]:
    assert column.offsets is not None
    return _differences(column.offsets.tolist())


def _differences(bounds: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(bounds)]


def _unit(values: torch.Tensor) -> int:
    """Bytes per index of the first dimension."""
    shape = values.shape
    return values.element_size() if len(shape) == 1 else values.element_size() * math.prod(shape[1:])


def split_rows(column: Column) -> Sequence[torch.Tensor]:
    """The rows' tensors, views of the column's values; JSON texts stay encoded."""
    if column.offsets is None:
        return column.values.unbind(0)
    bounds = column.offsets.tolist()
    if len(bounds) == 2:
        return (column.values,)
    values: Any = column.values  # torch leaves split untyped
    rows: Sequence[torch.Tensor] = values.split(_differences(bounds)) if len(bounds) > 1 else ()
    return rows


def _kind(column: Column) -> str:
    return "dense" if column.offsets is None else "json" if column.encoding == "json" else "jagged"


def _invalid(message: str, expected: object, found: object, where: object = None) -> QueueError:
    return QueueError(message, code="queue.invalid", where=where, expected=expected, found=found)
