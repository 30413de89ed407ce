"""Columns of samples, and the typed bytes of one sample of a column, as stores and files keep them.

A jagged column keeps its samples contiguously in one tensor with offsets and is never padded. A *cell* is the text of
the column's type and the bytes of one sample. It has no pickle and no Python class names. Stores that other programs
can change keep a *digest* with it.
"""

from __future__ import annotations

import functools
import json
import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs
import xxhash

from jackfield.abc.transfer_queue import Column, PutRequest
from jackfield.errors import QueueError, some

if TYPE_CHECKING:
    import torch

_BYTES = {"bool": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}

Kind: TypeAlias = Literal["dense", "jagged", "json"]
Buffer: TypeAlias = bytes | bytearray | memoryview
Cell: TypeAlias = tuple[str, Buffer]  #: the text of a ColumnType, and the bytes of one sample
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


@attrs.frozen(kw_only=True)
class ColumnType:
    """The type that all samples of a column share. A sample's length follows from its bytes."""

    kind: Kind
    dtype: str  #: torch's name without ``torch.``
    shape: tuple[int, ...]  #: shape of a sample; without the length of a jagged one

    @classmethod
    def of(cls, column: Column) -> ColumnType:
        """Return the type of a column."""
        kind: Kind = "dense" if column.offsets is None else "json" if column.encoding == "json" else "jagged"
        dtype = str(column.values.dtype).removeprefix("torch.")
        return cls(kind=kind, dtype=dtype, shape=tuple(column.values.shape[1:]))

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, text: str) -> ColumnType:
        """Return the type that has this ``text``; raise ``queue.store`` if the text is not a type."""
        expected = '["dense" | "jagged" | "json", dtype, [length, ...]]'
        try:
            kind, dtype, shape = json.loads(text)
            made = cls(kind=kind, dtype=dtype, shape=tuple(shape))
            if kind in ("dense", "jagged", "json") and made.unit >= 0:
                return made
        except (ValueError, TypeError, AttributeError):
            pass
        raise QueueError("the type of a value is damaged", code="queue.store", expected=expected, found=text)

    @property
    @functools.lru_cache(maxsize=1024)  # noqa: B019  types are few
    def text(self) -> str:
        """The text that stores keep for the type."""
        return json.dumps([self.kind, self.dtype, self.shape], separators=(",", ":"))

    @property
    @functools.lru_cache(maxsize=1024)  # noqa: B019
    def unit(self) -> int:
        """The bytes of a dense sample, or of each index of a jagged one."""
        return math.prod(self.shape) * (_BYTES.get(self.dtype) or int(dtype_of(self.dtype).itemsize))

    def length(self, content: Buffer) -> int:
        """Return the length of a jagged sample, or 1 for a dense one; ``queue.store`` if the bytes do not fit."""
        unit = self._checked_unit((len(content),))
        if self.kind == "dense":
            return 1
        return len(content) // unit if unit else int.from_bytes(content, "little")

    def _checked_unit(self, sizes: Iterable[int]) -> int:
        """Return the unit; raise ``queue.store`` if samples of this type cannot have these sizes in bytes."""
        unit = self.unit
        fixed = unit if self.kind == "dense" else None if unit else 8
        for size in set(sizes):
            if size % unit if fixed is None else size != fixed:
                message, found = "the bytes of a value do not fit its type", f"{size} bytes"
                raise QueueError(message, code="queue.store", expected=self.text, found=found)
        return unit


def content_of(column: Column) -> memoryview:
    """Return the bytes of all samples in order, in C order and little-endian, without a copy.

    If jagged samples have no bytes because a trailing dimension is 0, return their lengths as int64 instead.
    """
    import torch

    values = column.values
    if column.offsets is not None and not math.prod(values.shape[1:]):
        values = column.offsets.diff()
    raw: Any = values.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


def layout(column: Column) -> tuple[str, memoryview, list[int]]:
    """Return the text of a column's type, the bytes of all samples without a copy, and the samples' bounds in them.

    Sample ``i`` is ``content[bounds[i]:bounds[i + 1]]``.
    """
    kind, content = ColumnType.of(column), content_of(column)
    unit = kind.unit
    if column.offsets is not None and unit:
        return kind.text, content, (column.offsets * unit).tolist()
    size = unit if column.offsets is None else 8
    return kind.text, content, [number * size for number in range(len(column) + 1)]


def split(column: Column) -> tuple[str, list[memoryview]]:
    """Return the text of a column's type and the bytes of each sample, without a copy."""
    text, content, bounds = layout(column)
    return text, [content[start:end] for start, end in pairwise(bounds)]


def join(name: str, cells: Sequence[Cell], memory: Callable[[int], torch.Tensor | None] | None = None) -> Column:
    """Return cells as one column; ``name`` is the column's name for errors.

    ``memory`` returns uint8 ``[bytes]`` that already has the cells' bytes in order, or None if there is none. Without
    it, or if it returns None, the bytes are copied. Errors are those of :func:`column_of`.
    """
    texts, contents = zip(*cells, strict=True) if cells else ((), ())
    sizes = list(map(len, contents))
    there = None if memory is None else memory(sum(sizes))
    if there is None:
        there = tensor_of(bytearray().join(contents))
    return column_of(name, texts, sizes, there)


def column_of(name: str, types: Iterable[str], sizes: Sequence[int], content: torch.Tensor) -> Column:
    """Return samples with these texts of types and sizes in bytes as one column; ``name`` is its name for errors.

    ``content``, uint8 ``[bytes]``, has the bytes of the samples in order, and becomes the memory of the column. Samples
    of different types raise ``queue.column``, no samples ``queue.invalid``, and sizes that do not fit ``queue.store``.
    """
    texts = set(types)
    if not texts:
        raise QueueError("no rows are named", expected="one key at least")
    if len(texts) > 1:
        message = f"rows of column {name!r} do not fit together"
        expected = "one dtype, encoding and trailing shape, all jagged or all dense"
        raise QueueError(message, code="queue.column", where=name, expected=expected, found=sorted(texts))
    kind = ColumnType.parse(texts.pop())
    unit, dtype = kind._checked_unit(sizes), dtype_of(kind.dtype)
    if kind.kind == "dense":
        return Column(values=content.view(dtype).reshape(len(sizes), *kind.shape))
    lengths = [size // unit for size in sizes] if unit else content.view(dtype_of("int64")).tolist()
    values = (content if unit else content[:0]).view(dtype).reshape(sum(lengths), *kind.shape)
    return Column(values=values, offsets=offsets_of(lengths), encoding="json" if kind.kind == "json" else "tensor")


def cell_digest(partition: str, key: str, name: str, kind: str, content: Buffer) -> str:
    """Return the digest of a cell with its partition, key and column: xxh3_64 in 16 hexadecimal digits.

    Stores that other programs can change keep it, so that altered or swapped cells are detected.
    """
    hashed = xxhash.xxh3_64(json.dumps([partition, key, name, kind]).encode())
    hashed.update(content)
    return hashed.hexdigest()


def layouts(request: PutRequest) -> dict[str, tuple[str, memoryview, list[int]]]:
    """Return the :func:`layout` of each column of a put.

    Duplicate keys, and columns whose length is not the number of keys, raise ``queue.invalid``.
    """
    keys = request.keys
    if len(set(keys)) != len(keys):
        raise QueueError("a row is named twice", expected="distinct keys", found=list(keys)[:4])
    for name, column in request.columns.items():
        if len(column) != len(keys):
            raise QueueError(f"column {name!r} has {len(column)} rows", expected=len(keys), where=name)
    return {name: layout(column) for name, column in request.columns.items()}


def split_request(request: PutRequest) -> list[dict[str, Cell]]:
    """Return the cells of each sample of a put by column, without a copy; errors are those of :func:`layouts`."""
    samples: list[dict[str, Cell]] = [{} for _ in request.keys]
    for name, (text, content, bounds) in layouts(request).items():
        for sample, start, end in zip(samples, bounds, bounds[1:], strict=False):
            sample[name] = text, content[start:end]
    return samples


def unknown_sample(partition: str, key: str) -> QueueError:
    """Return the error for a get of a sample that does not exist."""
    return QueueError(f"no row {key!r} is in the queue", code="queue.unknown-sample", where=f"{partition}: {key}")


def lacking_column(partition: str, name: str, keys: Sequence[str], there: Iterable[str]) -> QueueError:
    """Return the error for a get of a column that samples lack. ``there`` has the columns of the first of them."""
    message = f"column {name!r} is not there in {len(keys)} rows, {keys[0]} first"
    expected = f"one of {', '.join(sorted(there)) or '(none)'}"
    return QueueError(message, code="queue.column", where=f"{partition}: {keys[0]}", expected=expected, found=name)


def damaged_samples(partition: str, keys: Iterable[str], where: str) -> QueueError:
    """Return the error for cells that differ from what was put. The samples are lost and can be generated again."""
    found, expected = sorted(set(keys)), "bytes with the digests that were put with them"
    message = f"values of {len(found)} rows of partition {partition!r} are not those that were put: {some(found)}"
    return QueueError(message, code="queue.lost", where=where, expected=expected, found=found)


def tensor_of(content: bytearray) -> torch.Tensor:
    """Return a uint8 tensor that uses ``content`` as its memory."""
    import torch

    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


def dtype_of(name: str) -> Any:
    """Return torch's dtype of a name; raise ``TypeError`` or ``AttributeError`` if there is none."""
    import torch

    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def offsets_of(lengths: Iterable[int]) -> torch.Tensor:
    """Return the offsets of jagged samples with these lengths, int64 ``[samples + 1]``."""
    import torch

    return torch.frombuffer(array("q", accumulate(lengths, initial=0)), dtype=torch.int64)


def dense_column(values: torch.Tensor) -> Column:
    """Return a column whose samples have one shape: ``values[i]`` of ``[samples, ...]``, any dtype."""
    if values.dim() == 0:
        raise _invalid("a dense column needs one row per index of its first dimension", "[rows, ...]", "a scalar")
    return Column(values=values.detach().cpu().contiguous())


def column_from_rows(rows: Sequence[torch.Tensor]) -> Column:
    """Return a jagged column of rows ``[length, ...]``.

    Lengths may differ and be 0; dtypes and trailing shapes may not (``queue.invalid``). No rows give an empty float32
    column.
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
    """Return a column of JSON values, kept as UTF-8 texts; values such as NaN and infinity raise ``queue.invalid``."""
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
    values, offsets = nested.values().detach(), nested.offsets().long()
    offsets = (offsets - offsets[:1]).cpu()
    if nested.lengths() is not None or len(values) != offsets[-1]:  # a view with holes
        return column_from_rows(list(nested.unbind()))
    return Column(values=values.to("cpu", copy=True).contiguous(), offsets=offsets)


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


def check_column(name: str, column: Column, rows: int) -> list[int]:
    """Check that a column keeps the contract of :class:`~jackfield.abc.transfer_queue.Column`, else ``queue.invalid``.

    Return the bytes of each sample's values.
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
