"""Distributions of numbers: count, mean, quantiles and a small histogram in text."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from jackfield_data_plan.parts import plain

_QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_BARS = "▁▂▃▄▅▆▇█"
_BINS = 16
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_QUOTED = re.compile(r"(['\"])(?:(?!\1).)*\1")
ROW_KEY = "_row"  #: the column with the key of a row


@attrs.frozen(kw_only=True)
class Distribution:
    """The distribution of the numbers of a column."""

    count: int  #: rows with a number
    others: int  #: rows without one, or with one that is not finite
    mean: float
    minimum: float
    maximum: float
    quantiles: Mapping[str, float]  #: by the share of rows that are at most so large, as text
    histogram: Sequence[int]  #: rows in bins of the same width from the minimum to the maximum
    of: str = "value"  #: what was counted: value, characters or entries

    def bars(self) -> str:
        """Return the histogram as one line of text."""
        most = max(self.histogram, default=0)
        return "".join(_BARS[math.ceil(n * len(_BARS) / most) - 1] if n else " " for n in self.histogram)


class Columns:
    """Collects numbers of columns, 8 bytes each."""

    def __init__(self, names: Iterable[str] | None = None, *, sizes: bool = False) -> None:
        """``names``: only these columns; ``sizes``: of texts the characters, of lists the entries are counted."""
        self._names, self._sizes = None if names is None else set(names), sizes
        self._numbers: dict[str, array[float]] = {}
        self._kinds: dict[str, str] = {}
        self.rows = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a row."""
        self.rows += 1
        for name, value in record.items():
            if name == ROW_KEY or (self._names is not None and name not in self._names):
                continue
            if (number := self._number(name, value)) is not None:
                self._numbers.setdefault(name, array("d")).append(number)

    def _number(self, name: str, value: Any) -> float | None:
        if isinstance(value, bool | int | float):
            number, kind = _float(value), "value"
        elif isinstance(value, str | list | dict) and self._sizes:
            number, kind = float(len(value)), "characters" if isinstance(value, str) else "entries"
        elif isinstance(value, list) and name.endswith("_found"):
            number, kind = float(len(value)), "entries"
        else:
            return None
        return number if math.isfinite(number) and self._kinds.setdefault(name, kind) == kind else None

    def distributions(self) -> dict[str, Distribution]:
        """Return the distribution of each column with numbers."""
        return {name: self._described(name, values) for name, values in self._numbers.items()}

    def _described(self, name: str, values: array[float]) -> Distribution:
        numbers = np.frombuffer(values, dtype=np.float64)
        least, most = float(numbers.min()), float(numbers.max())
        quantiles = np.quantile(numbers, _QUANTILES)
        with np.errstate(over="ignore"):
            wide = math.isfinite(most - least)
            counts = (
                np.histogram(numbers, bins=_BINS, range=(least, most))[0] if wide and most > least else [len(values)]
            )
            mean = float(numbers.mean())
        return Distribution(
            count=len(values),
            others=self.rows - len(values),
            mean=mean if math.isfinite(mean) else float(np.mean(numbers / len(numbers)) * len(numbers)),
            minimum=least,
            maximum=most,
            quantiles={f"{share:g}": float(each) for share, each in zip(_QUANTILES, quantiles, strict=True)},
            histogram=[int(each) for each in counts],
            of=self._kinds[name],
        )


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def reasons(why: Iterable[str]) -> Counter[str]:
    """Count reasons; numbers and quoted texts in them do not make different ones."""
    return Counter(_NUMBER.sub("N", _QUOTED.sub("'…'", each[:500])) for each in why)


def lines_of(found: Mapping[str, Distribution], indent: str = "  ") -> list[str]:
    """Return distributions as lines of text."""
    lines = list[str]()
    for name, each in found.items():
        label = plain(name, 60) if each.of == "value" else f"{plain(name, 60)} ({each.of})"
        told = f"{each.count} rows" + (f", {each.others} without" if each.others else "")
        shown = "  ".join(f"{share}: {value:.4g}" for share, value in each.quantiles.items())
        lines.append(f"{indent}{label}: {told}, mean {each.mean:.4g}, from {each.minimum:.4g} to {each.maximum:.4g}")
        lines.append(f"{indent}  |{each.bars()}|  {shown}")
    return lines
