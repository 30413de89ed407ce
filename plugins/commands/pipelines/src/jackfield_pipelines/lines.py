"""Rows as lines of JSON, of which stages decode what they read, and copy the rest as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

import msgspec

from jackfield_pipelines.row_sets import KEY

Record: TypeAlias = dict[str, Any]
ALL = "*"  #: stands for all columns
_encode, _decode = msgspec.json.Encoder().encode, msgspec.json.Decoder().decode


def reader(columns: Iterable[str]) -> Callable[[bytes], tuple[str, Record]]:
    """Return a function that returns the key of a line, and those of these columns that it has; ``*``: all."""
    names = tuple(dict.fromkeys(columns))
    if ALL in names:
        return _whole
    fields = {f"column_{number}": name for number, name in enumerate(names) if name != KEY}
    kinds: Any = [("key", str), *((field, Any, msgspec.UNSET) for field in fields)]
    made = msgspec.defstruct("Columns", kinds, rename={"key": KEY, **fields}, gc=False)
    decode = msgspec.json.Decoder(made).decode
    with_key, unset, given = KEY in names, msgspec.UNSET, tuple(fields.items())

    def read(line: bytes) -> tuple[str, Record]:
        row: Any = decode(line)
        values = {name: value for field, name in given if (value := getattr(row, field)) is not unset}
        if with_key:
            values[KEY] = row.key
        return row.key, values

    return read


def _whole(line: bytes) -> tuple[str, Record]:
    record = _decode(line)
    return record[KEY], record


def updated(line: bytes, known: Mapping[str, Any], values: Mapping[str, Any]) -> bytes:
    """Return a line with new values; ``known`` has those of their columns that it has."""
    if not values:
        return line
    if values.keys().isdisjoint(known):
        return line[:-2] + b"," + _encode(values)[1:] + b"\n"
    return encoded({**_decode(line), **values})


def encoded(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line."""
    return _encode(record) + b"\n"


def keyed(line: bytes, record: Mapping[str, Any], key: str, more: Mapping[str, Any]) -> bytes:
    """Return the line of a source with its key, and with the columns of ``more`` that it lacks.

    ``record`` is what the line, which need not have been written here, has.
    """
    if KEY in record:
        return encoded({**more, **record, KEY: key})
    head = line.strip()[:-1].rstrip()
    lacking = {name: value for name, value in more.items() if name not in record}
    return head + (b"," if record else b"") + _encode({**lacking, KEY: key})[1:] + b"\n"
