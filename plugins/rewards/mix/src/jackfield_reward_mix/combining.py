"""How the values of dimensions become one score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from jackfield.errors import RewardError
from jackfield_reward_mix.settings import Config

Values = Mapping[str, float]  #: by dimension; one that was skipped is missing


def clipped(config: Config, values: Values) -> dict[str, float]:
    """Return values within the limits of their dimensions."""
    found = dict(values)
    for name, (least, largest) in config.clip.items():
        if name in found:
            found[name] = min(max(found[name], least), largest)
    return found


def normalised(config: Config, group: Sequence[Values]) -> list[dict[str, float]]:
    """Return the values of a group, each dimension normalised over those samples that have it.

    Values that are all equal become 0.
    """
    found = [dict(values) for values in group]
    for name, kind in config.normalise.items():
        column = [values[name] for values in group if name in values]
        if not column:
            continue
        if kind == "z_score":
            middle = math.fsum(column) / len(column)
            spread = math.sqrt(math.fsum((value - middle) ** 2 for value in column) / len(column))
        else:
            middle, spread = min(column), max(column) - min(column)
        is_equal = max(column) == min(column)  # rounding may leave a spread
        for values in found:
            if name in values:
                values[name] = 0.0 if is_equal else (values[name] - middle) / spread
    return found


def combined(config: Config, values: Values, raw: Values, batch: int) -> float:
    """Return the score of values; ``raw`` are those that gates look at.

    The weights of dimensions that were skipped go to the others in proportion.
    """
    weights = {name: weight for name, weight in config.weights_at(batch).items() if name in values}
    if config.combine == "minimum":
        return min(weights[name] * values[name] for name in weights)
    if config.combine == "product":
        return _product(values, weights)
    everything = math.fsum(map(abs, config.weights_at(batch).values()))
    present = math.fsum(map(abs, weights.values()))
    if not present and everything:
        raise RewardError("all dimensions with a weight were skipped", code="reward.mix", expected="one or more")
    growth = everything / present if len(weights) < len(config.weights) and present else 1.0
    counted = [name for name in weights if _is_open(config, name, raw)]
    return growth * math.fsum(weights[name] * values[name] for name in counted)


def _is_open(config: Config, name: str, raw: Values) -> bool:
    gate = config.gates.get(name)
    return gate is None or raw[gate.needs] >= gate.at_least


def _product(values: Values, weights: Values) -> float:
    negative = sorted(name for name in weights if values[name] < 0.0)
    if negative:
        raise RewardError(
            "a product needs values from 0 on", code="reward.mix", where=", ".join(negative), expected=">= 0",
            found=", ".join(f"{values[name]:g}" for name in negative), fix="clip them, or use combine: sum",
        )  # fmt: skip
    try:
        return math.prod(math.pow(values[name], weights[name]) for name in weights)
    except (ValueError, OverflowError) as error:
        raise RewardError(
            "the product is no number", code="reward.mix", found=str(error), fix="clip the values"
        ) from error
