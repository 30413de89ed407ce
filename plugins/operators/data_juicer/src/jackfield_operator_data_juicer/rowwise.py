"""Filters and mappers of Data-Juicer, which work on one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_juicer.ops.base_op import NON_STATS_FILTERS

from jackfield.abc.operator import NewRow, OperatorResult, OperatorType, Row
from jackfield.errors import OperatorError
from jackfield_operator_data_juicer.bridge import META, STATS, Bridge
from jackfield_operator_data_juicer.values import Recorded, plain, texts

_KEPT = "jackfield_kept"  #: the statistic of a filter that decides by the row itself
#: Mappers that make several rows of one.
MULTIPLYING = frozenset(
    {
        "latex_figure_context_extractor_mapper",
        "nlpaug_en_mapper",
        "nlpcda_zh_mapper",
        "sentence_augmentation_mapper",
        "text_chunk_mapper",
        "video_split_by_duration_mapper",
        "video_split_by_key_frame_mapper",
    }
)


class Filtering(Bridge):
    """A filter: ``compute_stats`` makes statistics, and ``process`` decides by them alone."""

    type: OperatorType = "filter"

    @property
    def reads(self) -> tuple[str, ...]:
        """The operator's columns, and the statistics so far; all, where its code may read more."""
        return ("*",) if self.reads_more else (*self.keys, STATS, *((META,) if self.tags else ()))

    @property
    def writes(self) -> tuple[str, ...]:
        """Return the column of the statistics."""
        return (STATS,)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Compute statistics, beside which those of other filters stay."""
        updates, aside = dict[str, Any](), dict[str, str]()
        for row, found, why in self.each(rows, self._statistics):
            if why:
                aside[row.key] = why
            else:
                updates[row.key] = {STATS: {**(self.given(row, STATS) or {}), **found}}
        return OperatorResult(updates=updates, set_aside=aside)

    def _statistics(self, sample: dict[str, Any]) -> dict[str, Any]:
        if self.name in NON_STATS_FILTERS.modules:
            return {_KEPT: self._keeps(sample)}
        (found,) = self.called(self.op.compute_stats, texts(sample, self.keys))
        statistics: dict[str, Any] = plain(found[STATS])
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
                statistics = Recorded(row.values[STATS] or {})
                if self.name in NON_STATS_FILTERS.modules:
                    kept = bool(statistics[_KEPT])
                else:
                    kept = self._keeps({STATS: statistics})
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
        """The operator's columns, and tags; all, where its code may read more."""
        return ("*",) if self.reads_more else (*self.keys, *((META,) if self.tags else ()))

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
                changed = [self._changed(before, self.given(row, META), sample) for sample in found]
            except (TypeError, ValueError) as error:
                aside[row.key] = str(error)
                continue
            updates.update({row.key: changed[0]} if changed[0] else {})
            made += [NewRow(parents=(row.key,), values=values) for values in changed[1:]]
        return OperatorResult(updates=updates, set_aside=aside, made=tuple(made))

    def _changed(self, before: dict[str, Any], tags: Any, sample: dict[str, Any]) -> dict[str, Any]:
        found = {name: plain(value) for name, value in sample.items()}
        changed = {name: value for name, value in found.items() if name not in before or before[name] != value}
        if META in changed:
            changed[META] = {**(tags or {}), **changed[META]}
        return changed
