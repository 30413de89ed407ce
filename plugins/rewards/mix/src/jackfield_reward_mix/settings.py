"""The settings of the mixture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs.validators import ge

from jackfield.errors import ConfigError
from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Schedule:
    """A weight that changes with the number of the batch."""

    kind: Literal["linear", "cosine", "piecewise"] = option(
        help="linear, cosine: from start to end; piecewise: linear between points."
    )
    start: float | None = option(None, "linear, cosine: weight until the batch `first`.")
    end: float | None = option(None, "linear, cosine: weight from the batch `last` on.")
    first: int = option(0, "linear, cosine: batch at which the change begins.", ge(0))
    last: int | None = option(None, "linear, cosine: batch at which it ends.", ge(1))
    points: tuple[tuple[int, float], ...] = option((), "piecewise: pairs of a batch and a weight, in order.")

    def __attrs_post_init__(self) -> None:
        if self.kind == "piecewise":
            batches = [batch for batch, _ in self.points]
            if len(batches) < 2 or batches != sorted(set(batches)):
                raise _wrong("points", "two or more pairs [batch, weight], each batch after the one before", batches)
            if (self.start, self.end, self.last) != (None, None, None) or self.first:
                raise _wrong("start, end, first, last", "none of them with kind: piecewise", "one of them")
        else:
            if self.points:
                raise _wrong("points", f"none with kind: {self.kind}", self.points)
            if self.start is None or self.end is None or self.last is None or self.last <= self.first:
                found = {"start": self.start, "end": self.end, "first": self.first, "last": self.last}
                raise _wrong("start, end, last", "start, end, and last after first", found)

    def at(self, batch: int) -> float:
        """Return the weight of a batch."""
        if self.kind == "piecewise":
            return _interpolated(self.points, batch)
        assert self.start is not None
        assert self.end is not None
        assert self.last is not None
        share = min(max((batch - self.first) / (self.last - self.first), 0.0), 1.0)
        if self.kind == "cosine":
            share = (1.0 - math.cos(math.pi * share)) / 2.0
        return self.start + (self.end - self.start) * share


def _interpolated(points: tuple[tuple[int, float], ...], batch: int) -> float:
    if batch <= points[0][0]:
        return points[0][1]
    for (before, low), (after, high) in itertools.pairwise(points):
        if batch <= after:
            return low + (high - low) * (batch - before) / (after - before)
    return points[-1][1]


@attrs.frozen(kw_only=True)
class Gate:
    """What a dimension needs to count."""

    needs: str = option(help="The other dimension.")
    at_least: float = option(help="Its least value.")


@attrs.frozen(kw_only=True)
class Config:
    """Settings of the parts, and of how their dimensions become one score."""

    parts: Mapping[str, Mapping[str, Any]] | tuple[str | Mapping[str, Any], ...] = option(
        help="Other rewards by a name of your choice: the plugin's `name` and its settings. Or a list, each "
        "with its `weight` (1); parts are then named as their functions or plugins."
    )
    weights: Mapping[str, float | Schedule] = option(
        factory=dict,
        help="Weight of each dimension: PART is the score of a part, PART.NAME one of its dimensions or metrics.",
    )
    combine: Literal["sum", "product", "minimum"] = option(
        "sum",
        "sum: of weights times values; product: of values to the power of weights; minimum: of weights times values.",
    )
    clip: Mapping[str, tuple[float, float]] = option(factory=dict, help="Least and largest value, by dimension.")
    normalise: Mapping[str, Literal["z_score", "min_max"]] = option(
        factory=dict,
        help="By dimension, within each group, after clipping. z_score: minus the mean, over the standard deviation; "
        "min_max: from 0 to 1.",
    )
    gates: Mapping[str, Gate] = option(
        factory=dict, help="By dimension: it counts only if another one is large enough."
    )
    skip: tuple[str, ...] = option((), "Parts without which a sample is scored if they fail; the others' weights grow.")
    skip_after: int = option(0, "Retries of a sample until a part that failed is skipped.", ge(0))

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.parts, Mapping):
            parts, weights = _named(self.parts)
            if self.weights:
                raise _wrong("weights", "no weights beside a list of parts, which have their own", dict(self.weights))
            object.__setattr__(self, "parts", parts)
            object.__setattr__(self, "weights", weights)
        for name, part in self.by_name.items():
            if not isinstance(part.get("name"), str) or not name or "." in name:
                found = f"{name}: {dict(part)}"
                raise _wrong("parts", "a name without points, with the plugin's `name` and its settings", found)
        if not self.weights:
            raise _wrong("weights", "a weight for one or more dimensions", "none")
        for name in self.weights:
            if name.partition(".")[0] not in self.by_name:
                raise _wrong("weights", f"dimensions of the parts {', '.join(self.by_name)}", name)
        unused = self.by_name.keys() - {name.partition(".")[0] for name in self.weights}
        if unused:
            raise _wrong("parts", "parts of which a dimension has a weight", ", ".join(sorted(unused)))
        for setting in ("clip", "normalise", "gates"):
            for name in getattr(self, setting).keys() - self.weights.keys():
                raise _wrong(setting, f"dimensions with a weight: {', '.join(self.weights)}", name)
        self._check_values()
        self._check_skipping()

    def _check_values(self) -> None:
        for name, (least, largest) in self.clip.items():
            if least >= largest:
                raise _wrong(f"clip.{name}", "the least value below the largest", [least, largest])
        for name, gate in self.gates.items():
            if gate.needs not in self.weights or gate.needs == name:
                raise _wrong(f"gates.{name}.needs", "another dimension with a weight (0 is one)", gate.needs)
        if self.gates and self.combine != "sum":
            raise _wrong("gates", "combine: sum", f"combine: {self.combine}")
        if self.combine == "product" and any(kind == "z_score" for kind in self.normalise.values()):
            raise _wrong("normalise", "no z_score with combine: product, which needs values from 0 on", "z_score")

    def _check_skipping(self) -> None:
        for name in self.skip:
            if name not in self.by_name:
                raise _wrong("skip", f"some of {', '.join(self.by_name)}", name)
        if self.skip_after and not self.skip:
            raise _wrong("skip_after", "parts in skip", "none")
        if not self.by_name.keys() - set(self.skip):
            raise _wrong("skip", "one part or more that is not skipped", ", ".join(self.skip))
        for name, gate in self.gates.items():
            if gate.needs.partition(".")[0] in self.skip:
                raise _wrong(f"gates.{name}.needs", "a dimension of a part that is not skipped", gate.needs)

    @property
    def by_name(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the parts by name, also those that were given as a list."""
        assert isinstance(self.parts, Mapping)
        return self.parts

    @property
    def is_scheduled(self) -> bool:
        """Return whether a weight changes with the batch."""
        return any(isinstance(weight, Schedule) for weight in self.weights.values())

    def weights_at(self, batch: int) -> dict[str, float]:
        """Return the weights of a batch."""
        return {name: one.at(batch) if isinstance(one, Schedule) else one for name, one in self.weights.items()}


def _named(rewards: Sequence[str | Mapping[str, Any]]) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Return the parts of a list of rewards, and their weights, by the names of their functions or plugins."""
    parts, weights = dict[str, dict[str, Any]](), dict[str, Any]()
    for given in rewards:
        settings = {"name": given} if isinstance(given, str) else dict(given)
        weight, called = settings.pop("weight", 1.0), str(settings.get("path", settings.get("name", "")))
        called = called.rpartition(":")[2].replace(".", "_")
        names = (called if number == 1 else f"{called}_{number}" for number in itertools.count(1))
        name = next(each for each in names if each not in parts)
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise _wrong("parts", "a number as the weight of a part", f"{name}: {weight!r}")
        parts[name], weights[name] = settings, float(weight)
    return parts, weights


def _wrong(where: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"the mixture's {where} cannot be used", where=where, expected=expected, found=found)
