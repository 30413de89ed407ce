"""The stages of a pipeline over a set of rows: what an operator computes, what a filter decides, and an order."""

from __future__ import annotations

import array
import asyncio
import itertools
import os
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeAlias

import attrs
import msgspec
import numpy as np

from jackfield.abc.operator import NewRow, Operator, OperatorRequest, OperatorResult, Row, Selection
from jackfield.clock import Clock
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError, OperatorError, WorkerLost
from jackfield_pipelines.contract import (
    CONTRACT,
    broken,
    refuse_many,
    rows_errors,
    stages_errors,
    without_odd_numbers,
)
from jackfield_pipelines.lines import ALL, Record, encoded, reader, updated
from jackfield_pipelines.row_sets import KEY, LINEAGE, REMOVED, ROWS, SET_ASIDE, RowSet, RowSetWriter

Lines: TypeAlias = dict[str, bytes]  #: by key
_decode = msgspec.json.Decoder().decode
_SAVED_SECONDS = 2.0  #: between two savings of a stage's progress
_LATE = 16  #: requests in a row that passed their deadline, after which it is not the rows' fault; more than halvings
_PART = 4096  #: rows that are written together where no operator processes them


@attrs.frozen(kw_only=True)
class Limits:
    """What ends a pipeline, or a stage, early."""

    rows: int | None = None  #: rows that are read
    seconds: float | None = None
    set_aside: float = 0.1  #: most of the rows that a stage may set aside, as a share; the first 20 are free
    counters: Mapping[str, float] = attrs.field(factory=dict)  #: sums of the operator's counters: tokens, cost

    @property
    def given(self) -> dict[str, Any]:
        """The limits that end a stage before its last row, by the names of their settings."""
        named = {"rows": self.rows, "seconds": self.seconds, **self.counters}
        return {f"maximum_{name}": limit for name, limit in named.items() if limit is not None}

    def reached(self, seconds: float, counters: Mapping[str, float]) -> str | None:
        """Return the setting of a limit that is reached after a request; None: none is."""
        used = {"seconds": seconds, **counters}
        limits = {"seconds": self.seconds, **self.counters}
        over = (name for name, limit in limits.items() if limit is not None and used.get(name, 0.0) >= limit)
        return next((f"maximum_{name}" for name in over), None)


@attrs.define(eq=False, kw_only=True)
class OperatorStage:
    """Has an operator process rows batch by batch, and writes what becomes of them.

    The same code serves files (:meth:`run`) and batches that the caller holds (:meth:`apply`).
    """

    name: str  #: of the operator
    number: int = 0  #: of the operator in its pipeline, from 1; rows that it makes have it in their keys
    operator: Operator
    about: Mapping[str, Any] = attrs.field(factory=dict)  #: version and settings, for rows that it makes
    clock: Clock = attrs.field(factory=Clock)
    rows: int = 512  #: rows of a request
    seconds: float = 600.0  #: deadline of a request
    concurrent: int = 1  #: requests at a time, of an operator without a state that compares nothing
    counters: dict[str, float] = attrs.field(factory=dict)  #: what the operator has counted
    ended: str | None = attrs.field(default=None, init=False)  #: the limit at which it ended
    _late: int = attrs.field(default=0, init=False)  #: requests in a row that passed their deadline
    reads: frozenset[str] = attrs.field(init=False)
    writes: frozenset[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up once what the operator declares."""
        self.reads, self.writes = frozenset(self.operator.reads), frozenset(self.operator.writes)
        if KEY in self.writes:
            raise self._broken("its columns, with the keys of rows", "columns of the row", KEY)

    async def apply(self, records: Mapping[str, Record], *, batch: int = 0, steps: int = 0) -> OperatorResult:
        """Process records by key; rows with which the operator fails are set aside, each with its reason."""
        everything, reads = ALL in self.reads, self.reads
        rows = [
            Row(key=key, values=record if everything else {name: record[name] for name in reads if name in record})
            for key, record in records.items()
        ]
        try:
            return await self._asked(rows, batch, steps)
        except (asyncio.CancelledError, WorkerLost):
            raise
        except Exception as error:
            self._late = self._late + 1 if isinstance(error, DeadlineExceeded) else 0
            if getattr(error, "code", "") == CONTRACT or self._late >= _LATE:
                raise
            if len(rows) == 1 or self.operator.compares:
                reason = f"{type(error).__name__}: {error}" if not isinstance(error, JackfieldError) else str(error)
                return OperatorResult(set_aside=dict.fromkeys(records, reason))
        middle, keys = len(rows) // 2, list(records)
        halves = [{key: records[key] for key in part} for part in (keys[:middle], keys[middle:])]
        first, second = [await self.apply(half, batch=batch, steps=steps) for half in halves]
        return OperatorResult(
            updates={**first.updates, **second.updates},
            removed={**first.removed, **second.removed},
            set_aside={**first.set_aside, **second.set_aside},
            made=(*first.made, *second.made),
        )

    def decided(self, records: Mapping[str, Record]) -> Mapping[str, str]:
        """Return which records a filter does not keep, by its statistics, with the reasons."""
        return decision(self.operator, records, self.name)

    async def _asked(self, rows: Sequence[Row], batch: int, steps: int) -> OperatorResult:
        request = OperatorRequest(rows=tuple(rows), batch=batch, steps=steps, deadline_seconds=self.seconds)
        who = f"operator '{self.name}' with {len(rows)} rows from {rows[0].key}"
        with rows_errors(self.name):
            result = await self.clock.wait_for(self.operator.process(request), self.seconds, who)
        self._check(result, {row.key for row in rows})
        self._late = 0
        return without_odd_numbers(result, self.operator.type)

    def _check(self, result: OperatorResult, keys: set[str]) -> None:
        """Refuse keys that are not the request's, and columns that the operator does not declare."""
        if not isinstance(result, OperatorResult):
            raise self._broken("no result", "an OperatorResult", repr(result)[:200])
        if both := result.removed.keys() & result.set_aside.keys():
            raise self._broken("a row twice", "rows that are removed or set aside", repr(next(iter(both))))
        named = itertools.chain(result.updates, result.removed, result.set_aside, *(row.parents for row in result.made))
        if unknown := next((key for key in named if key not in keys), None):
            raise self._broken("a key that is not in its request", "keys of the request", repr(unknown))
        if childless := next((row for row in result.made if not row.parents), None):
            raise self._broken("a row without parents", "keys of the request", str(childless.values)[:200])
        values = itertools.chain(result.updates.values(), (row.values for row in result.made))
        if ALL in self.writes:
            if any(KEY in each for each in values):
                raise self._broken("another key to a row", "columns of the row", KEY)
        else:
            if other := next((extra for each in values if (extra := each.keys() - self.writes)), None):
                raise self._broken("columns that it does not declare", str(sorted(self.writes)), str(sorted(other)))

    def _broken(self, what: str, expected: str, found: str) -> OperatorError:
        return broken(self.name, what, expected, found)

    def made(self, rows: Sequence[NewRow], records: Mapping[str, Record]) -> list[Record]:
        """Return the records of rows that the operator made of others, with their keys."""
        return _made(rows, records, self.number)

    async def run(self, source: Iterable[bytes], writer: RowSetWriter, limits: Limits, total: int) -> None:
        """Process the ``total`` lines of a source, from where the writer's progress stands on; write in their order."""
        done, before = 0, 0.0
        if writer.state:
            done, before = writer.state["read"], writer.state.get("seconds", 0.0)
            self.operator.restore(writer.state["operator"])
            self.counters |= writer.state["counters"]
        saved = began = self.clock.time()
        async with aclosing(self._results(itertools.islice(source, done, limits.rows), done)) as results:
            async for lines, records, result in results:
                self._write(writer, lines, records, result)
                done += len(lines)
                if result.set_aside:
                    reason = next(iter(result.set_aside.values()))
                    refuse_many(self.name, writer.counts["set_aside"], done, limits.set_aside, reason)
                used = before + (now := self.clock.time()) - began
                if now - saved >= _SAVED_SECONDS:
                    state = {"operator": self.operator.state(), "counters": self.counters, "seconds": used}
                    writer.progress({"read": done, **state})
                    saved = now
                if "cost" in limits.counters and "tokens" in self.counters and "cost" not in self.counters:
                    details: Any = {"where": "data.pipeline.maximum_cost", "found": f"none in {self.name}"}
                    fix = "give the operator the prices of its model, or limit data.pipeline.maximum_tokens"
                    what, expected = "the cost of an operator is not known", "prices in the operator's settings"
                    raise ConfigError(what, expected=expected, fix=fix, **details)
                if done < total and (limit := limits.reached(used, self.counters)) is not None:
                    self.ended = limit
                    return
        if limits.rows is not None and limits.rows <= done < total:
            self.ended = "maximum_rows"

    async def _results(
        self, source: Iterable[bytes], done: int
    ) -> AsyncGenerator[tuple[Lines, Mapping[str, Record], OperatorResult], None]:
        """Yield what becomes of lines, part by part in their order."""
        compares = self.operator.compares
        pending = deque[tuple[Lines, dict[str, Record], asyncio.Task[OperatorResult]]]()
        size = 2**62 if compares else self.rows
        most = 1 if compares or type(self.operator).state is not Operator.state else self.concurrent
        parts = enumerate(_parts(source, (*self.reads, *self.writes), size), done // self.rows)
        try:
            for number, (lines, records) in parts:
                pending.append((lines, records, asyncio.ensure_future(self.apply(records, batch=number))))
                if len(pending) == most:
                    yield *pending[0][:2], await pending[0][2]
                    pending.popleft()
            while pending:
                yield *pending[0][:2], await pending[0][2]
                pending.popleft()
        finally:
            for *_, task in pending:
                task.cancel()
            await asyncio.gather(*(task for *_, task in pending), return_exceptions=True)

    def _write(self, writer: RowSetWriter, lines: Lines, records: Mapping[str, Record], result: OperatorResult) -> None:
        """Write what becomes of lines, of which ``records`` has the columns that the operator reads or writes."""
        lost = _write_lost(writer, result, self.name)
        try:
            for key, values in result.updates.items():
                lines[key] = updated(lines[key], records[key], values)
            parents = {key: _decode(lines[key]) for key in {row.parents[0] for row in result.made}}
            made = self.made(result.made, parents)
            new = [encoded(record) for record in made]
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise self._broken(
                "a value that JSON cannot hold", "texts, numbers, lists and objects", str(error)
            ) from error
        writer.append_lines(ROWS, [*(line for key, line in lines.items() if key not in lost), *new])
        lineage = [{KEY: record[KEY], "parents": row.parents} for record, row in zip(made, result.made, strict=True)]
        writer.append(LINEAGE, lineage)


def _parts(source: Iterable[bytes], columns: Iterable[str], size: int) -> Iterator[tuple[Lines, dict[str, Record]]]:
    """Yield so many lines at a time by their keys, and their columns."""
    read, source = reader(columns), iter(source)
    while part := list(itertools.islice(source, size)):
        rows = list(map(read, part))
        yield {key: line for (key, _), line in zip(rows, part, strict=True)}, dict(rows)


def _write_lost(writer: RowSetWriter, result: OperatorResult, name: str) -> set[str]:
    """Write the reasons of rows that do not go on; return their keys."""
    for file, gone in ((REMOVED, result.removed), (SET_ASIDE, result.set_aside)):
        writer.append(file, [{KEY: key, "why": why, "operator": name} for key, why in gone.items()])
    return {*result.removed, *result.set_aside}


def _made(rows: Sequence[NewRow], records: Mapping[str, Record], stage: int) -> list[Record]:
    """Return the records of new rows. A key says from which row, in which stage, and the how-manieth of that row."""
    counted, made = dict[str, int](), list[Record]()
    for row in rows:
        first = row.parents[0]
        number = counted[first] = counted.get(first, 0) + 1
        made.append({**records[first], **row.values, KEY: f"{first}>{stage}.{number}"})
    return made


def decision(operator: Operator, records: Mapping[str, Record], name: str) -> Mapping[str, str]:
    """Return which records a filter does not keep, by the columns that it writes, with the reasons."""
    columns = tuple(operator.writes)
    rows = [
        Row(key=key, values=record if ALL in columns else {each: record.get(each) for each in columns})
        for key, record in records.items()
    ]
    with stages_errors(name, "instead of a decision"):
        found = operator.decide(rows)
    if not isinstance(found, Mapping) or not found.keys() <= records.keys():
        raise broken(name, "another decision than it may", "reasons by the keys of rows", repr(found)[:200])
    return found


def decide(operator: Operator, source: Iterable[bytes], writer: RowSetWriter, name: str) -> None:
    """Keep the rows that a filter keeps, by its statistics alone."""
    for lines, records in _parts(source, tuple(operator.writes), _PART):
        lost = _write_lost(writer, OperatorResult(removed=decision(operator, records, name)), name)
        writer.append_lines(ROWS, [line for key, line in lines.items() if key not in lost])


def order(selection: Selection, source: RowSet, writer: RowSetWriter, name: str) -> None:
    """Write rows in the order of a column; equal ones in the order of the source. Only numbers are kept in memory."""
    numbers, offsets, end, read = array.array("d"), array.array("Q", [0]), 0, reader([selection.by])
    for line in source.lines():
        value = read(line)[1].get(selection.by)
        numbers.append(float(value) if isinstance(value, int | float) else float("nan"))
        offsets.append(end := end + len(line))
    keys = np.array(numbers)
    places = np.argsort(-keys if selection.largest_first else keys, kind="stable")  # NaN comes last
    limit = len(places) if selection.limit is None else selection.limit
    with (source.folder / ROWS).open("rb") as file:
        descriptor = file.fileno()
        for start in range(0, len(places), _PART):
            part = places[start : start + _PART].tolist()
            lines = [os.pread(descriptor, offsets[at + 1] - offsets[at], offsets[at]) for at in part]
            kept = max(0, min(len(part), limit - start))
            writer.append_lines(ROWS, lines[:kept])
            gone = zip(part[kept:], lines[kept:], strict=True)
            told = [
                (read(line)[0], f"{selection.by} is {numbers[at]:g}, and {limit} rows come before") for at, line in gone
            ]
            writer.append(REMOVED, [{KEY: key, "why": why, "operator": name} for key, why in told])
