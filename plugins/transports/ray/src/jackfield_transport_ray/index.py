"""The index of cells: it maps each cell to an object of Ray's store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

#: A cell: its type, the name of its object, the number of the array in it, start there and size, in bytes.
Entry: TypeAlias = "tuple[str, str, int, int, int]"


@attrs.frozen
class Found:
    """The answer to a get."""

    unknown: list[str]
    lacking: list[tuple[str, str, list[str]]]  #: row, column, and the columns that are there
    entries: list[Entry]  #: row after row
    objects: dict[str, Any]  #: references, by name


@attrs.define
class _Object:
    reference: Any
    owner: str  #: the backend that has put it
    cells: int = 0


class Index:
    """The index: an object of one process, or an actor for several. Its references keep objects alive."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str], dict[str, Entry]] = {}
        self._objects: dict[str, _Object] = {}
        self._bytes = 0

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        columns: Sequence[str],
        entries: Sequence[Entry],
        objects: Mapping[str, Any],
        owner: str,
    ) -> None:
        """Add rows; ``entries`` are row after row."""
        for name, reference in objects.items():
            self._objects[name] = _Object(reference, owner)
        following = iter(entries)
        for key in keys:
            row = self._rows.setdefault((partition, key), {})
            for column in columns:
                entry = next(following)
                self._objects[entry[1]].cells += 1
                self._bytes += entry[4]
                if column in row:
                    self._forget([row[column]])
                row[column] = entry
        for name in objects:
            if not self._objects[name].cells:
                del self._objects[name]

    def _forget(self, entries: Iterable[Entry]) -> int:
        size = 0
        for entry in entries:
            known = self._objects[entry[1]]
            known.cells -= 1
            size += entry[4]
            if not known.cells:
                del self._objects[entry[1]]
        self._bytes -= size
        return size

    def get(self, partition: str, keys: Sequence[str], columns: Sequence[str]) -> Found:
        """Return where cells are."""
        found = Found([], [], [], {})
        for key in keys:
            row = self._rows.get((partition, key))
            if row is None:
                found.unknown.append(key)
                continue
            for column in columns:
                if column in row:
                    found.entries.append(row[column])
                else:
                    found.lacking.append((key, column, sorted(row)))
        if not found.unknown and not found.lacking:
            found.objects.update({entry[1]: self._objects[entry[1]].reference for entry in found.entries})
        return found

    def delete(self, partition: str, keys: Sequence[str]) -> tuple[int, int]:
        """Delete rows; return the numbers of deleted rows and bytes."""
        rows = [row for key in keys if (row := self._rows.pop((partition, key), None)) is not None]
        return len(rows), sum(self._forget(row.values()) for row in rows)

    def stats(self) -> tuple[int, int, int]:
        """Return the numbers of rows, bytes and objects."""
        return len(self._rows), self._bytes, len(self._objects)

    def everything(self, but: str | None = None) -> tuple[dict[tuple[str, str], dict[str, Entry]], dict[str, Any]]:
        """Return the rows of this moment, and references to the objects; without those of the owner ``but``."""
        rows = {place: dict(row) for place, row in self._rows.items()}
        return rows, {name: known.reference for name, known in self._objects.items() if known.owner != but}

    def replace(
        self, rows: Mapping[tuple[str, str], Mapping[str, Entry]], objects: Mapping[str, Any], owner: str
    ) -> tuple[int, int]:
        """Replace all rows by these; return the numbers of rows and bytes."""
        self._rows = {place: dict(row) for place, row in rows.items()}
        self._objects = {name: _Object(reference, owner) for name, reference in objects.items()}
        self._bytes = 0
        for row in self._rows.values():
            for entry in row.values():
                self._objects[entry[1]].cells += 1
                self._bytes += entry[4]
        return len(self._rows), self._bytes
