"""Tables and view, the same in SQLite and PostgreSQL, and their creation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import sqlalchemy as sql
from sqlalchemy.dialects import postgresql

from jackfield.errors import QueueError
from jackfield_transport_sql.config import TAG_COLUMNS

FORMAT = 3
VIEW = "jackfield_experiences"
_LOCK = 0x6A61636B  #: PostgreSQL's advisory lock under which one process makes the tables

_METADATA = sql.MetaData()

_FORMAT_TABLE = sql.Table(
    "jackfield_format",
    _METADATA,
    sql.Column("version", sql.Integer, primary_key=True),
    sql.Column("tag_columns", sql.Text, nullable=False),
)


def _row_key() -> list[sql.Column[str]]:
    return [sql.Column(name, sql.Text, primary_key=True) for name in ("queue", "partition", "key")]


def _shown() -> list[sql.Column[Any]]:
    return [
        sql.Column("created", sql.DateTime(timezone=True), nullable=False, server_default=sql.func.now()),
        sql.Column("reward", sql.Double),  # the sum over the tokens, where there is one for each
        sql.Column("prompt", sql.Text),
        sql.Column("response", sql.Text),
        sql.Column("tags", sql.Text, nullable=False, server_default="{}"),
    ]


#: One line for each sample that is in the queue: what people look at.
SAMPLES = sql.Table("jackfield_samples", _METADATA, *_row_key(), *_shown())

#: The same of samples that the queue has forgotten.
HISTORY = sql.Table("jackfield_history", _METADATA, *_row_key(), *_shown())

#: One line for each sample and column: the values. JSON columns are text, all others typed blobs.
CELLS = sql.Table(
    "jackfield_cells",
    _METADATA,
    *_row_key(),
    sql.Column("name", sql.Text, primary_key=True),
    sql.Column("type", sql.Text, nullable=False),
    sql.Column("bytes", sql.BigInteger, nullable=False),
    sql.Column("digest", sql.Text, nullable=False),  # of the value and its place: what is altered is not read
    sql.Column("text", sql.Text),
    sql.Column("content", sql.LargeBinary),
)


def prepare(connection: sql.Connection, tag_columns: Sequence[str] | None) -> None:
    """Create missing tables and the view in a writing transaction; refuse tables of another format."""
    server = connection.dialect.name == "postgresql"
    if server:
        connection.execute(sql.select(sql.func.pg_advisory_xact_lock(_LOCK)))
    if not sql.inspect(connection).has_table(_FORMAT_TABLE.name):
        _METADATA.create_all(connection)
        if server:  # tensors do not compress, and trying takes longer than writing
            connection.exec_driver_sql(f"ALTER TABLE {CELLS.name} ALTER COLUMN content SET STORAGE EXTERNAL")
        names = TAG_COLUMNS if tag_columns is None else tag_columns
        connection.execute(sql.insert(_FORMAT_TABLE).values(version=FORMAT, tag_columns=json.dumps(list(names))))
        _make_view(connection, names)
        return
    found = connection.execute(sql.select(_FORMAT_TABLE.c.version)).scalars().all()
    if found != [FORMAT]:
        raise QueueError(
            "the tables in the database are of another format",
            code="queue.store",
            where=connection.engine.url.render_as_string(hide_password=True),
            expected=f"format {FORMAT}",
            found=f"format {', '.join(map(str, found)) or 'unknown'}",
            fix="use another database, or the version of jackfield-transport-sql that wrote it",
        )
    known = json.loads(connection.execute(sql.select(_FORMAT_TABLE.c.tag_columns)).scalar_one())
    if tag_columns is not None and list(tag_columns) != known:
        connection.execute(sql.update(_FORMAT_TABLE).values(tag_columns=json.dumps(list(tag_columns))))
        _make_view(connection, tag_columns)


def _make_view(connection: sql.Connection, tag_columns: Sequence[str]) -> None:
    parts = [
        sql.select(
            *(table.c[name] for name in ("queue", "partition", "key", "created")),
            sql.literal(state).label("state"),
            *(table.c[name] for name in ("reward", "prompt", "response")),
            *(_tag(connection, table, name) for name in dict.fromkeys(tag_columns)),
            table.c.tags,
        )
        for table, state in ((SAMPLES, "queued"), (HISTORY, "done"))
    ]
    query = sql.union_all(*parts).compile(connection, compile_kwargs={"literal_binds": True})
    connection.exec_driver_sql(f"DROP VIEW IF EXISTS {VIEW}")
    connection.exec_driver_sql(f"CREATE VIEW {VIEW} AS {query}")


def _tag(connection: sql.Connection, table: sql.Table, name: str) -> sql.ColumnElement[Any]:
    extracted: sql.ColumnElement[Any]
    if connection.dialect.name == "postgresql":
        extracted = sql.cast(table.c.tags, postgresql.JSON)[name].astext
    else:
        extracted = sql.func.json_extract(table.c.tags, f'$."{name}"')
    return extracted.label(f"tag_{name}" if name in {*SAMPLES.c.keys(), "state"} else name)
