"""What changes between two scores of the same samples."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

_SAME = 1e-9  #: a smaller difference of two scores is none


@attrs.frozen(kw_only=True)
class Pair:
    """A sample with its old and its new score; None: it has none."""

    key: str
    group: str
    data_source: str
    old: float | None
    new: float | None
    error: str | None = None  #: why it has no new score


def compared(pairs: Sequence[Pair], largest: int) -> dict[str, Any]:
    """Return the differences of all samples, of each data source, and the samples with the largest changes."""
    sources: dict[str, list[Pair]] = {}
    for pair in pairs:
        sources.setdefault(pair.data_source, []).append(pair)
    changed = [pair for pair in _both(pairs) if _differ(pair)]
    changed.sort(key=lambda pair: -abs(_change(pair)))  # a stable order: the first of equal ones first
    return {
        "all": _summary(pairs),
        "data_sources": {name: _summary(some) for name, some in sorted(sources.items())},
        "largest": [
            {"key": each.key, "old": each.old, "new": each.new, "change": _change(each)} for each in changed[:largest]
        ],
        "failed": [{"key": each.key, "error": each.error} for each in pairs if each.new is None][:largest],
    }


def _summary(pairs: Sequence[Pair]) -> dict[str, Any]:
    both = _both(pairs)
    ranks = list(_rank_correlations(both))
    return {
        "samples": len(pairs),
        "compared": len(both),
        "mean_old": _mean([pair.old for pair in both]),
        "mean_new": _mean([pair.new for pair in both]),
        "changed": _mean([float(_differ(pair)) for pair in both]),
        "no_longer_scored": sum(pair.old is not None and pair.new is None for pair in pairs),
        "newly_scored": sum(pair.old is None and pair.new is not None for pair in pairs),
        "rank_correlation": _mean(ranks),
        "ranked_groups": len(ranks),
    }


def _both(pairs: Iterable[Pair]) -> list[Pair]:
    return [pair for pair in pairs if pair.old is not None and pair.new is not None]


def _change(pair: Pair) -> float:
    return float(pair.new or 0.0) - float(pair.old or 0.0)


def _differ(pair: Pair) -> bool:
    return abs(_change(pair)) > _SAME


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def _rank_correlations(pairs: Sequence[Pair]) -> Iterable[float]:
    """Yield Spearman's rank correlation of old and new scores of each group in which neither are all equal."""
    groups: dict[str, list[Pair]] = {}
    for pair in pairs:
        groups.setdefault(pair.group, []).append(pair)
    for group in groups.values():
        old, new = (ranks([float(getattr(pair, name)) for pair in group]) for name in ("old", "new"))
        if len(set(old)) > 1 and len(set(new)) > 1:
            yield _correlation(old, new)


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values, from 0; equal values share their mean rank."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found, start = [0.0] * len(values), 0
    for end in range(1, len(order) + 1):
        if end == len(order) or values[order[end]] != values[order[start]]:
            for index in order[start:end]:
                found[index] = (start + end - 1) / 2
            start = end
    return found


def _correlation(old: Sequence[float], new: Sequence[float]) -> float:
    middle = (len(old) - 1) / 2
    product = math.fsum((one - middle) * (other - middle) for one, other in zip(old, new, strict=True))
    sizes = [math.fsum((one - middle) ** 2 for one in values) for values in (old, new)]
    return product / math.sqrt(sizes[0] * sizes[1])


def table(found: Mapping[str, Any]) -> str:
    """Return the differences as text."""
    rows = {"all": found["all"], **found["data_sources"]} if len(found["data_sources"]) > 1 else {"all": found["all"]}
    names = list(found["all"])
    cells = [["", *(name.replace("_", " ") for name in names)]]
    cells += [[source or "-", *(_cell(row[name]) for name in names)] for source, row in rows.items()]
    lines = _aligned(cells)
    if found["largest"]:
        largest = [["largest changes", "old", "new", "change"]]
        largest += [
            [each["key"], *(_cell(each[name]) for name in ("old", "new", "change"))] for each in found["largest"]
        ]
        lines += ["", *_aligned(largest)]
    if found["failed"]:
        lines += [
            "",
            "no score",
            *(f"{each['key']}  {each['error'] or ''}".replace("\n", " ") for each in found["failed"]),
        ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
