"""Rows and cells of one queue in the two tables: the statements of transactions, and readable columns."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql, sqlite

from jackfield.abc.transfer_queue import DeleteResult, StatsResult
from jackfield.errors import ConfigError, PluginError, QueueError
from jackfield.sdk.archive import BATCH_ROWS, SavedSample, batches
from jackfield.sdk.cells import Cell, ColumnType, cell_digest, damaged_samples, join
from jackfield_transport_sql.schema import CELLS, HISTORY, SAMPLES

_TEXTS = {"prompt_ids": "prompt", "response_ids": "response"}


class Reader:
    """A converter of rewards to numbers and, with a tokenizer, of token ids to text."""

    def __init__(self, tokenizer: str | None) -> None:
        self._tokenizer = None if tokenizer is None else _load(Path(tokenizer))

    def columns(self, cells: Mapping[str, Cell]) -> dict[str, Any]:
        """Return ``reward``, ``prompt`` and ``response`` of a row; None if missing in ``cells``."""
        found: dict[str, Any] = {"reward": None, "prompt": None, "response": None}
        if "reward" in cells:
            found["reward"] = _sum(cells["reward"])
        for name, column in _TEXTS.items():
            if self._tokenizer is not None and name in cells:
                ids = join(name, [cells[name]]).values.reshape(-1).tolist()
                found[column] = self._tokenizer.decode(ids, skip_special_tokens=False).replace("\0", "\ufffd")
        return found


def _sum(cell: Cell) -> float | None:
    values = join("reward", [cell]).values
    if not values.numel() or values.is_complex() or ColumnType.parse(cell[0]).kind == "json":
        return None
    total = float(values.double().sum())
    return total if math.isfinite(total) else None


def _load(folder: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        message = "texts need the package tokenizers"
        raise PluginError(message, where="tokenizer", fix="pip install 'jackfield-transport-sql[text]'") from error
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ConfigError("the folder has no tokenizer.json", where="tokenizer", found=str(folder))
    return Tokenizer.from_file(str(file))


_VALUE = ("type", "text", "content")  #: a cell's columns
_CELL_BYTES = 900_000_000  #: both databases end at about 1 GB


def _remember(dialect: Any, where: Sequence[sql.ColumnElement[bool]]) -> Any:
    """Copy samples into the history; the last of a key counts."""
    insert = dialect.insert(HISTORY)
    copied = insert.from_select([column.name for column in HISTORY.c], sql.select(*SAMPLES.c).where(*where))
    replaced = {column.name: insert.excluded[column.name] for column in HISTORY.c if not column.primary_key}
    return copied.on_conflict_do_update(index_elements=list(HISTORY.primary_key), set_=replaced)


def _upserts(dialect: Any) -> tuple[Any, Any]:
    """Insert samples, or keep what is not given; insert cells, or replace them."""
    samples, cells = dialect.insert(SAMPLES), dialect.insert(CELLS)
    kept = {
        name: sql.func.coalesce(samples.excluded[name], SAMPLES.c[name]) for name in ("reward", "prompt", "response")
    }
    replaced = {name: cells.excluded[name] for name in ("type", "bytes", "digest", "text", "content")}
    return (
        samples.on_conflict_do_update(index_elements=list(SAMPLES.primary_key), set_=kept),
        cells.on_conflict_do_update(index_elements=list(CELLS.primary_key), set_=replaced),
    )


_DIALECTS: dict[str, Any] = {"sqlite": sqlite, "postgresql": postgresql}
_UPSERTS = {name: _upserts(dialect) for name, dialect in _DIALECTS.items()}
_UPDATE_TAGS = (
    sql.update(SAMPLES)
    .where(*(SAMPLES.c[name] == sql.bindparam(f"at_{name}") for name in ("queue", "partition", "key")))
    .values(tags=sql.bindparam("new_tags"))
)


class Rows:
    """The rows of the queue ``name``; each method works in the transaction of its connection."""

    def __init__(self, name: str, reader: Reader, history: bool) -> None:
        self._name = name
        self._reader = reader
        self._history = history

    def write(self, connection: sql.Connection, rows: Iterable[SavedSample]) -> int:
        """Insert rows, or replace their given cells; return the bytes of values."""
        ordered = sorted(rows, key=lambda row: (row.partition, row.key))  # one order for all writers: no deadlocks
        if not ordered:
            return 0
        samples, cells = _UPSERTS[connection.dialect.name]
        places = [{"queue": self._name, "partition": row.partition, "key": row.key} for row in ordered]
        connection.execute(
            samples,
            [
                {**place, **self._reader.columns(row.cells), "tags": _json(row.tags or {})}
                for place, row in zip(places, ordered, strict=True)
            ],
        )
        stored = [
            {**place, "name": name, **_stored(name, row, cell)}
            for place, row in zip(places, ordered, strict=True)
            for name, cell in sorted(row.cells.items())
        ]
        if stored:
            connection.execute(cells, stored)
        return sum(cell["bytes"] for cell in stored)

    def cells(
        self, connection: sql.Connection, partition: str, keys: Sequence[str], names: Sequence[str] | None = None
    ) -> dict[tuple[str, str], Cell]:
        """Return existing cells by key and name (None: all names); ``queue.lost`` names altered rows."""
        query = sql.select(*(CELLS.c[name] for name in ("key", "name", "digest", *_VALUE)))
        if names is not None:
            query = query.where(CELLS.c.name.in_(names))
        found, damaged = {}, []
        for some in _chunks(list(dict.fromkeys(keys))):
            for key, name, digest, *value in connection.execute(query.where(*self._at(CELLS, partition, some))):
                cell = _cell((partition, key, name), digest, *value)
                if cell is None:
                    damaged.append(key)
                else:
                    found[key, name] = cell
        if damaged:
            raise damaged_samples(partition, damaged, connection.engine.url.render_as_string(hide_password=True))
        return found

    def names(self, connection: sql.Connection, partition: str | None) -> dict[tuple[str, str], tuple[str, ...]]:
        """Return the columns of each sample of a partition, or of all."""
        found: dict[tuple[str, str], tuple[str, ...]] = dict.fromkeys(self.places(connection, partition), ())
        query = sql.select(CELLS.c.partition, CELLS.c.key, CELLS.c.name).where(*self._in(CELLS, partition))
        for part, key, name in connection.execute(query):
            found[part, key] = (*found.get((part, key), ()), name)
        return found

    def delete(self, connection: sql.Connection, partition: str, keys: Iterable[str]) -> DeleteResult:
        """Delete rows; unknown keys are ignored. Their readable columns go to the history, if there is one."""
        rows = size = 0
        for some in _chunks(sorted(set(keys))):
            where = self._at(SAMPLES, partition, some)
            # a put locks its samples first, too, in the same order: no deadlock, and no cell without its sample
            connection.execute(sql.select(SAMPLES.c.key).where(*where).order_by(SAMPLES.c.key).with_for_update())
            if self._history:
                connection.execute(_remember(_DIALECTS[connection.dialect.name], where))
            cells = sql.delete(CELLS).where(*self._at(CELLS, partition, some)).returning(CELLS.c.bytes)
            size += sum(connection.execute(cells).scalars())
            rows += len(connection.execute(sql.delete(SAMPLES).where(*where).returning(SAMPLES.c.key)).all())
        return DeleteResult(samples=rows, bytes=size)

    def queued_again(self, connection: sql.Connection, rows: Iterable[SavedSample]) -> None:
        """Mark rows that a restore brings back as queued."""
        for partition, group in groupby(rows, key=lambda row: row.partition):
            for some in _chunks([row.key for row in group]):
                connection.execute(sql.delete(HISTORY).where(*self._at(HISTORY, partition, some)))

    def delete_all(self, connection: sql.Connection) -> None:
        """Delete all samples."""
        for table in (SAMPLES, CELLS):
            connection.execute(sql.delete(table).where(table.c.queue == self._name))

    def count(self, connection: sql.Connection) -> StatsResult:
        """Return the number of rows, and the bytes of values."""
        rows = sql.select(sql.func.count()).select_from(SAMPLES).where(SAMPLES.c.queue == self._name)
        size = sql.select(sql.func.coalesce(sql.func.sum(CELLS.c.bytes), 0)).where(CELLS.c.queue == self._name)
        return StatsResult(
            samples=connection.execute(rows).scalar_one(), bytes=int(connection.execute(size).scalar_one())
        )

    def show_tags(self, connection: sql.Connection, partition: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
        """Store the tags of rows by key; unknown keys are ignored."""
        place = {"at_queue": self._name, "at_partition": partition}
        updates = [{**place, "at_key": key, "new_tags": _json(each)} for key, each in sorted(tags.items())]
        if updates:
            connection.execute(_UPDATE_TAGS, updates)

    def places(self, connection: sql.Connection, partition: str | None = None) -> list[tuple[str, str]]:
        """Return partition and key of each sample, in order."""
        query = sql.select(SAMPLES.c.partition, SAMPLES.c.key).where(*self._in(SAMPLES, partition))
        ordered = query.order_by(SAMPLES.c.partition, SAMPLES.c.key)
        return [(part, key) for part, key in connection.execute(ordered)]

    def archived(self, connection: sql.Connection, places: Sequence[tuple[str, str]]) -> Iterator[SavedSample]:
        """Yield complete rows, loading as many at a time as fit into memory."""
        sizes = sql.select(CELLS.c.key, sql.func.sum(CELLS.c.bytes)).group_by(CELLS.c.key)
        tags = sql.select(SAMPLES.c.key, SAMPLES.c.tags)
        for partition, group in groupby(places, key=lambda place: place[0]):
            for some in _chunks([key for _, key in group]):
                shown = dict(connection.execute(tags.where(*self._at(SAMPLES, partition, some))).all())
                large = dict(connection.execute(sizes.where(*self._at(CELLS, partition, some))).all())
                for few in batches(some, lambda key, large=large: int(large.get(key, 0))):  # type: ignore[misc]
                    found: dict[str, dict[str, Cell]] = {key: {} for key in few}
                    for (key, name), cell in self.cells(connection, partition, few).items():
                        found[key][name] = cell
                    for key in few:
                        row_tags = json.loads(shown[key])
                        yield SavedSample(partition=partition, key=key, cells=found[key], tags=row_tags)

    def _in(self, table: sql.Table, partition: str | None) -> list[sql.ColumnElement[bool]]:
        return [table.c.queue == self._name, *([] if partition is None else [table.c.partition == partition])]

    def _at(self, table: sql.Table, partition: str, keys: Sequence[str]) -> list[sql.ColumnElement[bool]]:
        return [table.c.queue == self._name, table.c.partition == partition, table.c.key.in_(keys)]


def _cell(place: tuple[str, str, str], digest: str, kind: str, text: str | None, content: bytes | None) -> Cell | None:
    """Return the stored cell; None if it differs from what was put."""
    try:
        value = text.encode() if text else content or b""
        return (kind, value) if cell_digest(*place, kind, value) == digest else None
    except (TypeError, AttributeError):  # another program's types
        return None


def _stored(name: str, row: SavedSample, cell: Cell) -> dict[str, Any]:
    """Return a cell's columns: JSON as text, where it is text that databases take, all else as bytes."""
    kind, content = cell
    if len(content) > _CELL_BYTES:
        raise QueueError(
            f"a value of column {name!r} is too large for a database",
            where=row.key,
            expected=f"{_CELL_BYTES} bytes at most",
            found=len(content),
            fix="put smaller rows, or use another backend",
        )
    text = None
    if ColumnType.parse(kind).kind == "json" and content:
        with suppress(UnicodeDecodeError):
            text = str(content, "utf-8")
    if text is not None and "\0" in text:
        text = None
    return {
        "type": kind,
        "bytes": len(content),
        "digest": cell_digest(row.partition, row.key, name, kind, content),
        "text": text,
        "content": content if text is None else None,
    }


def _json(tags: Mapping[str, Any]) -> str:
    return json.dumps(dict(tags), ensure_ascii=False, default=str).replace("\\u0000", "\\ufffd")


def _chunks(keys: Sequence[str]) -> Iterator[Sequence[str]]:
    return (keys[start : start + BATCH_ROWS] for start in range(0, len(keys), BATCH_ROWS))
