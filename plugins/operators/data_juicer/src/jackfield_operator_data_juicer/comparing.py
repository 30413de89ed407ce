"""Deduplicators and selectors of Data-Juicer, which compare all rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from data_juicer.utils.constant import HashKeys

from jackfield.abc.operator import OperatorResult, OperatorType, Row
from jackfield_operator_data_juicer.bridge import Bridge
from jackfield_operator_data_juicer.reading import names_field
from jackfield_operator_data_juicer.values import packed, plain, texts, unpacked

RANK = "__dj__rank__"  #: the column of a selector: the row's place in the selection, or -1
_UID = str(HashKeys.uid)


class Comparing(Bridge):
    """What Data-Juicer applies to all rows together, as a dataset."""

    compares: ClassVar[bool] = True

    def dataset(self, samples: Sequence[Mapping[str, Any]]) -> Any:
        """Return samples as a dataset, with their numbers as the column ``at``, and as Data-Juicer's own."""
        import datasets
        from data_juicer.core.data import NestedDataset

        datasets.disable_progress_bars()
        datasets.disable_caching()
        names = ("at", *((_UID,) if names_field(type(self.op), "HashKeys.uid") else ()))
        numbered = [{**sample, **dict.fromkeys(names, at)} for at, sample in enumerate(samples)]
        return NestedDataset(datasets.Dataset.from_list(numbered))


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
    def writes(self) -> tuple[str, ...]:
        """The place in the selection."""
        return (RANK,)

    def work(self, rows: Sequence[Row]) -> OperatorResult:
        """Have the operator select from rows that have the field."""
        random.seed(self.seed)
        np.random.seed(self.seed % 2**32)
        missing = [(row.key, name) for row in rows for name in self.reads if name not in row.values]
        aside = {key: f"there is no column {name!r}" for key, name in missing}
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
