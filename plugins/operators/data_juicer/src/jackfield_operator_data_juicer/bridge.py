"""What an operator of Data-Juicer does, in terms of rows: what is the same for all of its types."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import xxhash
from data_juicer.utils.constant import Fields

from jackfield.abc.operator import OperatorResult, OperatorType, Row
from jackfield.errors import ConfigError
from jackfield_operator_data_juicer import guard
from jackfield_operator_data_juicer.making import refusal
from jackfield_operator_data_juicer.offline import Offline
from jackfield_operator_data_juicer.reading import column_settings, reads_fields, thresholds, uses_tags

STATS, META = str(Fields.stats), str(Fields.meta)
#: Settings of columns that belong together: a row needs one of them.
_ANY = frozenset({"messages_key", "choices_key", "usage_key", "response_metadata_key"})
_FILES = ("image_key", "audio_key", "video_key")  #: settings of columns that name files
_PROBE = "There were 7 cards. Dan buys 1. How many now?\nThe answer is 8."


class Bridge:
    """An operator of Data-Juicer, and what of rows it reads and writes."""

    type: OperatorType = "mapper"
    compares: ClassVar[bool] = False

    def __init__(self, name: str, op: Any, seed: int) -> None:
        self.name, self.op, self.seed = name, op, seed
        #: Whether it reads or writes tags: the column ``__dj__meta__``.
        self.tags = uses_tags(type(op))
        settings = [name for name in column_settings(type(op)) if name != "api_key"]
        named = {name: value for name in settings if isinstance(value := getattr(op, name, None), str) and value}
        #: Names of the columns that the operator's code reads by a setting ``*_key``.
        self.keys = tuple(dict.fromkeys(value.partition(".")[0] for value in named.values()))
        self._any = tuple(value for name, value in named.items() if name in _ANY)
        #: Whether it may read columns that no setting ``*_key`` names.
        self.reads_more = not self.keys or reads_fields(type(op))

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
        files = [getattr(self.op, name, None) for name in _FILES]
        row = Row(key="probe", values={name: ["no-file"] if name in files else _PROBE for name in self.keys})
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
        return Offline()

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
            before = len(guard.refused())
            try:
                found, why = work(self.sample(row)), ""
            except Exception as error:
                found, why = None, f"{type(error).__name__}: {error}"[:500]
            if now := guard.refused()[before:]:  # which the operator may have passed over
                found, why = None, now[0]
            yield row, found, why

    def sample(self, row: Row) -> dict[str, Any]:
        """Return Data-Juicer's form of a row: its columns, and those of statistics and tags."""
        missing = [name for name in self.keys if name not in row.values]
        if missing and (self._any != self.keys or missing == [*self.keys]):
            raise ValueError(f"there is no column {missing[0]!r}")
        text = str(getattr(self.op, "text_key", ""))
        if text in self.keys and not isinstance(row.values[text], str | list):
            raise TypeError(f"column {text!r} has {type(row.values[text]).__name__}, not a text")
        names = row.values if "*" in self.reads else [name for name in self.reads if name in row.values]
        values = {name: copy.deepcopy(row.values[name]) for name in names if name != "_row"}
        tags = {META: copy.deepcopy(self.given(row, META) or {})} if self.tags else {}
        return {**values, STATS: {}, **tags}

    def given(self, row: Row, name: str) -> Any:
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
