"""What an operator of Data-Juicer does, in terms of rows. Only the interpreter that has Data-Juicer imports this."""

from __future__ import annotations

import copy
import inspect
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import xxhash
from data_juicer.ops.base_op import NON_STATS_FILTERS, TAGGING_OPS
from data_juicer.utils.constant import Fields
from loguru import logger

from jackfield.abc.operator import NewRow, OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError, OperatorError
from jackfield_operator_data_juicer.making import Offline, is_own, kind_of, make, refusal, thresholds
from jackfield_operator_data_juicer.values import Recorded, packed, plain, texts, unpacked

_KEY = re.compile(r"self\.(\w+_key)\b")
_STATS, _META = str(Fields.stats), str(Fields.meta)
_KEPT = "jackfield_kept"  #: the statistic of a filter that decides by the row itself
RANK = "__dj__rank__"  #: the column of a selector: the row's place in the selection, or -1
#: Mappers that make several rows of one.
MULTIPLYING = frozenset({"text_chunk_mapper", "sentence_augmentation_mapper", "nlpaug_en_mapper", "nlpcda_zh_mapper"})
#: Deduplicators that change the text of rows, and leave none out.
REWRITING = frozenset({"document_line_deduplicator"})
_PROBE = "There were 7 cards. Dan buys 1. How many now?\nThe answer is 8."


class Bridge:
    """An operator of Data-Juicer, and what of rows it reads and writes."""

    type: OperatorType = "mapper"
    compares: ClassVar[bool] = False

    def __init__(self, name: str, op: Any, seed: int) -> None:
        self.name, self.op, self.seed = name, op, seed

    @staticmethod
    def of(name: str, settings: Mapping[str, Any], columns: Mapping[str, str], seed: int) -> Bridge:
        """Make an operator, and try it on a row of its own, which it may be unable to process."""
        logger.remove()
        logger.add(sys.stderr, level="WARNING")
        op = make(name, {**{key: value for key, value in columns.items() if key not in settings}, **settings})
        bridge = Rewriting if name in REWRITING else _BRIDGES[kind_of(type(op))]
        made: Bridge = bridge(name, op, seed)
        made.probe()
        return made

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the columns that the operator's code reads by a setting ``*_key``."""
        source = "".join(inspect.getsource(each) for each in type(self.op).__mro__ if is_own(each))
        found = dict.fromkeys(getattr(self.op, key, None) for key in _KEY.findall(source))
        return tuple(name for name in found if isinstance(name, str) and name)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of columns that the operator reads."""
        return self.keys

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of columns that it writes."""
        return ("*",)

    def check_thresholds(self, names: Mapping[str, Any]) -> None:
        """Refuse thresholds that the operator reads while it computes statistics."""
        if wrong := sorted(names.keys() - thresholds(type(self.op))):
            what = (
                f"{', '.join(wrong)} of Data-Juicer's {self.name} are no thresholds: more than its decision reads them"
            )
            raise ConfigError(
                what, where="thresholds", expected=str(sorted(thresholds(type(self.op)))), found=str(wrong)
            )

    def probe(self) -> None:
        """Refuse an operator that wants the network, a program or a package for a row."""
        row = Row(key="probe", values=dict.fromkeys(self.keys, _PROBE))
        with self.offline() as seen:
            try:
                self.work([row])
            except Exception as error:
                if isinstance(error, ImportError) and not seen:
                    seen.append(f"{type(error).__name__}: {error}")
        if seen:
            raise refusal(self.name, seen[0])

    def offline(self) -> Offline:
        """Refuse the network, programs, models and installations in a block."""
        return Offline(type(self.op))

    def process(self, rows: Sequence[Row]) -> OperatorResult:
        """Process rows; those that cannot be processed are set aside."""
        with self.offline():
            return self.work(rows)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Process rows, within the guard."""
        raise NotImplementedError

    def decide(self, rows: Sequence[Row]) -> dict[str, str]:
        """Return the rows that are not kept."""
        return {}

    def state(self) -> Any:
        """Return what is remembered of rows."""
        return None

    def restore(self, state: Any) -> None:
        """Remember the rows that a state has."""

    def each(self, rows: Sequence[Row], work: Callable[[dict[str, Any]], Any]) -> Iterator[tuple[Row, Any, str]]:
        """Yield each row with what becomes of its sample, or why it cannot be processed."""
        for row in rows:
            digest = xxhash.xxh3_64_intdigest(row.key.encode(), self.seed & (2**64 - 1))
            random.seed(digest)
            np.random.seed(digest % 2**32)
            try:
                yield row, work(self.sample(row)), ""
            except Exception as error:
                yield row, None, f"{type(error).__name__}: {error}"[:500]

    def sample(self, row: Row) -> dict[str, Any]:
        """Return Data-Juicer's form of a row: its columns, and those of statistics and tags."""
        if missing := [name for name in self.keys if name not in row.values]:
            raise ValueError(f"there is no column {missing[0]!r}")
        text = str(getattr(self.op, "text_key", ""))
        if text in self.keys and not isinstance(row.values[text], str | list):
            raise TypeError(f"column {text!r} has {type(row.values[text]).__name__}, not a text")
        names = row.values if "*" in self.reads else [name for name in self.reads if name in row.values]
        values = {name: copy.deepcopy(row.values[name]) for name in names if name != "_row"}
        return {**values, _STATS: {}, **({_META: {}} if self.name in TAGGING_OPS.modules else {})}

    def _given(self, row: Row, name: str) -> Any:
        """Return a value of a row that the operator reads; None: it has none."""
        return row.values.get(name) if {name, "*"} & {*self.reads} else None

    def called(self, method: Callable[[Any], Any], sample: dict[str, Any]) -> list[dict[str, Any]]:
        """Call a method with one sample, as a batch if it expects batches; return its samples."""
        if not self.op.is_batched_op():
            return [method(sample)]
        found = method({name: [value] for name, value in sample.items()})
        lengths = {len(values) for values in found.values()}
        if len(lengths) != 1:
            raise ValueError(f"the columns of its result have {sorted(lengths)} rows")
        return [{name: values[at] for name, values in found.items()} for at in range(lengths.pop())]


class Filtering(Bridge):
    """A filter: ``compute_stats`` makes statistics, and ``process`` decides by them alone."""

    type: OperatorType = "filter"

    @property
    def reads(self) -> tuple[str, ...]:
        """The operator's columns, and the statistics so far; all, where its code names no column."""
        own = self.keys or tuple(filter(None, [str(getattr(self.op, "field_key", "")).partition(".")[0]]))
        return tuple(dict.fromkeys((*own, _STATS))) if own else ("*",)

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column of the statistics."""
        return (_STATS,)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Compute statistics, beside which those of other filters stay."""
        updates, aside = dict[str, Any](), dict[str, str]()
        for row, found, why in self.each(rows, self._statistics):
            if why:
                aside[row.key] = why
            else:
                updates[row.key] = {_STATS: {**(self._given(row, _STATS) or {}), **found}}
        return OperatorResult(updates=updates, set_aside=aside)

    def _statistics(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.name in NON_STATS_FILTERS.modules:
            return {_KEPT: self._keeps(sample)}
        (found,) = self.called(self.op.compute_stats, texts(sample, self.keys))
        statistics: dict[str, Any] = plain(found[_STATS])
        return statistics

    def _keeps(self, sample: dict[str, Any]) -> bool:
        given = {name: [value] for name, value in sample.items()} if self.op.is_batched_op() else sample
        found = self.op.process(given)
        return bool(next(iter(found)) if self.op.is_batched_op() else found)

    def decide(self, rows: Sequence[Row]) -> dict[str, str]:
        """Ask the operator, which gets nothing but the statistics; the reason names those that it reads."""
        gone = dict[str, str]()
        with self.offline():
            for row in rows:
                statistics = Recorded(row.values[_STATS] or {})
                if self.name in NON_STATS_FILTERS.modules:
                    kept = bool(statistics[_KEPT])
                else:
                    kept = self._keeps({_STATS: statistics})
                if not kept:
                    seen = ", ".join(f"{name} is {str(statistics.get(name))[:80]}" for name in statistics.read)
                    gone[row.key] = f"{self.name}: {seen}"
        return gone


class Changing(Bridge):
    """A mapper: it changes columns, or makes several rows of one, of which the first stays in its place."""

    def __init__(self, name: str, op: Any, seed: int) -> None:
        super().__init__(name, op, seed)
        self.type = "synthesizer" if name in MULTIPLYING else "mapper"

    @property
    def reads(self) -> tuple[str, ...]:
        """The operator's columns, and tags; all, where its code names no column."""
        tags = (_META,) if self.name in TAGGING_OPS.modules else ()
        return (*self.keys, *tags) if self.keys else ("*",)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Return the columns that have other values."""
        updates, aside, made = dict[str, Any](), dict[str, str](), list[NewRow]()
        for row, found, why in self.each(rows, lambda sample: self.called(self.op.process, sample)):
            if not why and len(found) != 1 and self.type != "synthesizer":
                raise OperatorError(f"Data-Juicer's {self.name} made {len(found)} rows of one", where=self.name)
            if why or not found:
                aside[row.key] = why or f"{self.name} made no row of it"
                continue
            try:
                before = self.sample(row)
                changed = [self._changed(before, self._given(row, _META), sample) for sample in found]
            except (TypeError, ValueError) as error:
                aside[row.key] = str(error)
                continue
            updates.update({row.key: changed[0]} if changed[0] else {})
            made += [NewRow(parents=(row.key,), values=values) for values in changed[1:]]
        return OperatorResult(updates=updates, set_aside=aside, made=tuple(made))

    def _changed(self, before: dict[str, Any], tags: Any, sample: dict[str, Any]) -> dict[str, Any]:
        found = {name: plain(value) for name, value in sample.items()}
        changed = {name: value for name, value in found.items() if name not in before or before[name] != value}
        if _META in changed:
            changed[_META] = {**(tags or {}), **changed[_META]}
        return changed


class Comparing(Bridge):
    """What Data-Juicer applies to all rows together, as a dataset."""

    compares: ClassVar[bool] = True

    def dataset(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        """Return samples as a dataset, with their numbers as the column ``at``."""
        import datasets
        from data_juicer.core.data import NestedDataset

        datasets.disable_progress_bars()
        datasets.disable_caching()
        return NestedDataset(datasets.Dataset.from_list([{**sample, "at": at} for at, sample in enumerate(samples)]))


class Deduplicating(Comparing):
    """A deduplicator: ``compute_hash`` for each row, and ``process`` over the hashes of all rows so far."""

    type: OperatorType = "deduplicator"

    def __init__(self, name: str, op: Any, seed: int) -> None:
        super().__init__(name, op, seed)
        self._seen = list[dict[str, Any]]()

    @property
    def writes(self) -> tuple[str, ...]:
        """Return that no column is written."""
        return ()

    def hashed(self, rows: Sequence[Row]) -> tuple[list[tuple[Row, dict[str, Any]]], dict[str, str]]:
        """Return rows with the columns that the operator adds, and why others cannot be processed."""
        found, aside = list[tuple[Row, dict[str, Any]]](), dict[str, str]()
        for row, sample, why in self.each(rows, self._hashed):
            if why:
                aside[row.key] = why
            else:
                found.append((row, {**sample, "key": row.key}))
        return found, aside

    def _hashed(self, sample: dict[str, Any]) -> dict[str, Any]:
        before = set(sample)
        (found,) = self.called(self.op.compute_hash, texts(sample, self.keys))
        return {name: value for name, value in found.items() if name not in before}

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Remove rows that the operator removes from the set of these and earlier ones."""
        found, aside = self.hashed(rows)
        samples = [*self._seen, *(sample for _, sample in found)]
        if not found:
            return OperatorResult(set_aside=aside)
        kept = {int(at) for at in self.op.process(self.dataset(samples))[0]["at"]}
        removed, first = dict[str, str](), dict[str, str]()
        for at, sample in enumerate(samples):
            alike = first.setdefault(repr([value for name, value in sample.items() if name != "key"]), sample["key"])
            if at >= len(self._seen) and at not in kept:
                same = f"the same as {alike}" if alike != sample["key"] else "nearly the same as an earlier row"
                removed[sample["key"]] = f"{self.name}: {same}"
        self._seen += [sample for _, sample in found if sample["key"] not in removed]
        return OperatorResult(removed=removed, set_aside=aside)

    def state(self) -> Any:
        """Return the hashes of the rows so far."""
        return [plain(packed(sample)) for sample in self._seen]

    def restore(self, state: Any) -> None:
        """Go on from hashes."""
        self._seen = [unpacked(sample) for sample in state or ()]

    def probe(self) -> None:
        """Try it, and forget the row."""
        super().probe()
        self._seen = []


class Rewriting(Deduplicating):
    """A deduplicator that changes the texts of rows by what they have in common, and keeps all rows."""

    type: OperatorType = "mapper"

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column of the text."""
        return (str(self.op.text_key),)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Return changed texts."""
        column = str(self.op.text_key)
        found, aside = self.hashed(rows)
        samples = [*self._seen, *({**sample, column: row.values[column]} for row, sample in found)]
        if not found:
            return OperatorResult(set_aside=aside)
        texts_after = list(self.op.process(self.dataset(samples))[0][column])[len(self._seen) :]
        self._seen = samples
        changed = zip(found, texts_after, strict=True)
        updates = {row.key: {column: text} for (row, _), text in changed if text != row.values[column]}
        return OperatorResult(updates=updates, set_aside=aside)


class Selecting(Comparing):
    """A selector, as a filter over all rows: the place in its selection is the statistic, and the order stays."""

    type: OperatorType = "filter"

    @property
    def reads(self) -> tuple[str, ...]:
        """The column of the field that it looks at."""
        return tuple(filter(None, [str(getattr(self.op, "field_key", "") or "").partition(".")[0]]))

    @property
    def writes(self) -> tuple[str, ...]:
        """The place in the selection."""
        return (RANK,)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Have the operator select from rows that have the field."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        aside = {
            row.key: f"there is no column {name!r}" for row in rows for name in self.reads if name not in row.values
        }
        able = [row for row in rows if row.key not in aside]
        samples = [{name: row.values[name] for name in self.reads} for row in able]
        chosen = [int(at) for at in self.op.process(self.dataset(samples))["at"]] if able else []
        places = {at: place for place, at in enumerate(chosen)}
        updates = {row.key: {RANK: places.get(at, -1)} for at, row in enumerate(able)}
        return OperatorResult(updates=updates, set_aside=aside)

    def decide(self, rows: Sequence[Row]) -> dict[str, str]:
        """Leave out what was not selected."""
        return {row.key: f"not selected by {self.name}" for row in rows if row.values[RANK] < 0}

    def probe(self) -> None:
        """It has nothing to try: a row alone is always selected."""


_BRIDGES: dict[str, Any] = {
    "Filter": Filtering,
    "Mapper": Changing,
    "Deduplicator": Deduplicating,
    "Selector": Selecting,
}
