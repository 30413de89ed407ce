"""The stages of a pipeline over a set of rows: what an operator computes, what a filter decides, and an order."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import attrs
import msgspec
import numpy as np

from jackfield.abc.operator import NewRow, Operator, OperatorRequest, OperatorResult, Row, Selection
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, OperatorError, WorkerLost
from jackfield_pipelines.row_sets import KEY, LINEAGE, REMOVED, ROWS, SET_ASIDE, RowSet, RowSetWriter

Record: TypeAlias = dict[str, Any]
_decode = msgspec.json.Decoder().decode
_SAVED_SECONDS = 2.0  #: between two savings of a stage's progress
_ALL = "*"
CONTRACT = "operator.contract"  #: the code of a result that the contract does not allow


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
    clock: Clock = attrs.field(factory=Clock)
    rows: int = 512  #: rows of a request
    seconds: float = 600.0  #: deadline of a request
    counters: dict[str, float] = attrs.field(factory=dict)  #: what the operator has counted
    ended: str | None = attrs.field(default=None, init=False)  #: the limit at which it ended
    reads: frozenset[str] = attrs.field(init=False)
    writes: frozenset[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Look up once what the operator declares."""
        self.reads, self.writes = frozenset(self.operator.reads), frozenset(self.operator.writes)

    async def apply(self, records: Mapping[str, Record], *, batch: int = 0, steps: int = 0) -> OperatorResult:
        """Process records by key; rows with which the operator fails are set aside, each with its reason."""
        everything, reads = _ALL in self.reads, self.reads
        rows = [
            Row(key=key, values=record if everything else {name: record[name] for name in reads if name in record})
            for key, record in records.items()
        ]
        try:
            return await self._asked(rows, batch, steps)
        except (asyncio.CancelledError, WorkerLost):
            raise
        except Exception as error:
            if getattr(error, "code", "") == CONTRACT:
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
        everything = _ALL in self.writes
        rows = [
            Row(key=key, values=record if everything else {name: record.get(name) for name in self.writes})
            for key, record in records.items()
        ]
        return self.operator.decide(rows)

    async def _asked(self, rows: Sequence[Row], batch: int, steps: int) -> OperatorResult:
        request = OperatorRequest(rows=tuple(rows), batch=batch, steps=steps, deadline_seconds=self.seconds)
        who = f"operator '{self.name}' with {len(rows)} rows from {rows[0].key}"
        result = await self.clock.wait_for(self.operator.process(request), self.seconds, who)
        self._check(result, {row.key for row in rows})
        return result

    def _check(self, result: OperatorResult, keys: set[str]) -> None:
        """Refuse keys that are not the request's, and columns that the operator does not declare."""
        named = itertools.chain(result.updates, result.removed, result.set_aside, *(row.parents for row in result.made))
        if unknown := next((key for key in named if key not in keys), None):
            raise self._broken("a key that is not in its request", "keys of the request", repr(unknown))
        if childless := next((row for row in result.made if not row.parents), None):
            raise self._broken("a row without parents", "keys of the request", str(childless.values)[:200])
        if _ALL not in self.writes:
            values = itertools.chain(result.updates.values(), (row.values for row in result.made))
            if other := next((extra for each in values if (extra := each.keys() - self.writes)), None):
                raise self._broken("columns that it does not declare", str(sorted(self.writes)), str(sorted(other)))

    def _broken(self, what: str, expected: str, found: str) -> OperatorError:
        message = f"the operator gave {what}"
        return OperatorError(message, code=CONTRACT, where=self.name, expected=expected, found=found)

    def made(self, rows: Sequence[NewRow], records: Mapping[str, Record]) -> list[Record]:
        """Return the records of rows that the operator made of others, with their keys."""
        return _made(rows, records, self.number)

    async def run(self, source: Iterable[Record], writer: RowSetWriter, limits: Limits) -> None:
        """Process all records of a source, from where the writer's progress stands on."""
        done: int = writer.state["read"] if writer.state else 0
        if writer.state:
            self.operator.restore(writer.state["operator"])
            self.counters |= writer.state["counters"]
        saved = began = self.clock.time()
        for number, records in _batches(itertools.islice(source, done, limits.rows), self._cut(done)):
            result = await self.apply(records, batch=number)
            _write(writer, records, result, self.name, self.number)
            done += len(records)
            await asyncio.sleep(0)  # a cancellation is noticed, although the operator may never wait
            self._refuse_many(writer, done, limits, result)
            if (now := self.clock.time()) - saved >= _SAVED_SECONDS:
                state = {"operator": self.operator.state(), "counters": self.counters}
                writer.progress({"read": done, **state})
                saved = now
            if (limit := limits.reached(now - began, self.counters)) is not None:
                self.ended = limit
                return
        if limits.rows is not None and done >= limits.rows:
            self.ended = "maximum_rows"

    def _cut(self, done: int) -> tuple[int, int]:
        """Return the number of the next batch, and how many rows it has."""
        return done // self.rows, 2**62 if self.operator.compares else self.rows

    def _refuse_many(self, writer: RowSetWriter, done: int, limits: Limits, result: OperatorResult) -> None:
        aside = writer.counts["set_aside"]
        if result.set_aside and aside > max(20, limits.set_aside * done):
            reason = next(iter(result.set_aside.values()))
            details: Any = {"where": self.name, "expected": f"at most {limits.set_aside:.0%} of the rows"}
            fix = "correct the rows or the operator's settings, or raise data.pipeline.maximum_set_aside"
            what = f"{aside:.0f} of {done} rows were set aside"
            raise OperatorError(what, code="operator.set-aside", found=reason, fix=fix, **details)


def _batches(source: Iterable[Record], first: tuple[int, int]) -> Iterator[tuple[int, dict[str, Record]]]:
    number, size = first
    source = iter(source)
    while part := {record[KEY]: record for record in itertools.islice(source, size)}:
        yield number, part
        number += 1


def _write(
    writer: RowSetWriter, records: Mapping[str, Record], result: OperatorResult, name: str, stage: int = 0
) -> None:
    """Write what becomes of records."""
    for file, gone in ((REMOVED, result.removed), (SET_ASIDE, result.set_aside)):
        writer.append(file, [{KEY: key, "why": why, "operator": name} for key, why in gone.items()])
    lost = {*result.removed, *result.set_aside}
    kept = [record for key, record in records.items() if key not in lost] if lost else list(records.values())
    for key, values in result.updates.items():
        records[key].update(values)
    made = _made(result.made, records, stage)
    writer.append(ROWS, [*kept, *made])
    lineage = [{KEY: record[KEY], "parents": row.parents} for record, row in zip(made, result.made, strict=True)]
    writer.append(LINEAGE, lineage)


def _made(rows: Sequence[NewRow], records: Mapping[str, Record], stage: int) -> list[Record]:
    """Return the records of new rows. A key says from which row, in which stage, and the how-manieth of that row."""
    counted, made = dict[str, int](), list[Record]()
    for row in rows:
        first = row.parents[0]
        number = counted[first] = counted.get(first, 0) + 1
        made.append({**records[first], **row.values, KEY: f"{first}>{stage}.{number}"})
    return made


def decide(operator: Operator, source: Iterable[Record], writer: RowSetWriter, name: str, rows: int = 4096) -> None:
    """Keep the rows that a filter keeps, by its statistics alone."""
    columns = frozenset(operator.writes)
    done: int = writer.state or 0
    for _, records in _batches(itertools.islice(source, done, None), (0, rows)):
        seen = [
            Row(key=key, values=record if _ALL in columns else {each: record.get(each) for each in columns})
            for key, record in records.items()
        ]
        _write(writer, records, OperatorResult(removed=operator.decide(seen)), name)


def order(selection: Selection, source: RowSet, writer: RowSetWriter, name: str) -> None:
    """Write rows in the order of a column; equal ones in the order of the source. Only numbers are kept in memory."""
    numbers, offsets, end = list[float](), [0], 0
    with (source.folder / ROWS).open("rb") as file:
        for line in file:
            value = _decode(line).get(selection.by)
            numbers.append(float(value) if isinstance(value, int | float) else float("nan"))
            offsets.append(end := end + len(line))
        keys = np.array(numbers)
        places = np.argsort(-keys if selection.largest_first else keys, kind="stable")  # NaN comes last
        for at, place in enumerate(places.tolist()):
            file.seek(offsets[place])
            record = _decode(file.read(offsets[place + 1] - offsets[place]))
            if selection.limit is None or at < selection.limit:
                writer.append(ROWS, [record])
            else:
                why = f"{selection.by} is {numbers[place]:g}, and {selection.limit} rows come before"
                writer.append(REMOVED, [{KEY: record[KEY], "why": why, "operator": name}])
