"""What agent loops and rewards report in numbers: tags of samples, metrics of a step, an environment's rewards."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from jackfield.abc.agent import AgentSequence


def metric_tags(kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an agent loop's or reward's (``kind``) metrics as tags ``KIND/NAME``."""
    return {f"{kind}/{name}": float(value) for name, value in metrics.items()}


def not_finite(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics of a plugin that are not finite numbers and so cannot be reported."""
    return {
        name: value
        for name, value in metrics.items()
        if not (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
    }


def said(names: Iterable[str]) -> list[str]:
    """Return the names of tags of agent loop and reward: ``turns``, ``agent/NAME``, ``reward/NAME``."""
    return [name for name in names if name == "turns" or name.startswith(("agent/", "reward/"))]


def said_metrics(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return means of tags: ``agent/turns``, ``agent/NAME/mean``, ``reward/NAME/mean``, ``agent/ended/REASON``."""
    means = {}
    for name in said(dict.fromkeys(chain.from_iterable(rows))):
        values = [tags[name] for tags in rows if name in tags]
        means["agent/turns" if name == "turns" else f"{name}/mean"] = sum(values) / len(values)
    ends = Counter(tags["end_reason"] for tags in rows if "end_reason" in tags)
    return means | {f"agent/ended/{reason}": count / len(rows) for reason, count in sorted(ends.items())}


def own_rewards(sequence: AgentSequence) -> list[float] | None:
    """Return the environment's rewards, one per response token; None: it gave none, or one for the whole sequence.

    Rewards that do not fit the tokens or turns, or are not finite, raise a ``ValueError``.
    """
    if sequence.token_rewards is None and sequence.turn_rewards is None:
        return None
    mask = [*sequence.response_mask, 0]
    rewards = list(map(float, sequence.token_rewards or (0.0,) * (len(mask) - 1)))
    ends = [place for place in range(len(mask) - 1) if mask[place] and not mask[place + 1]]
    turns = (0.0,) * len(ends) if sequence.turn_rewards is None else sequence.turn_rewards
    if len(rewards) != len(mask) - 1 or len(turns) != len(ends):
        found = f"{len(rewards)} rewards of {len(mask) - 1} tokens, {len(turns)} of {len(ends)} turns"
        raise ValueError(f"the environment's rewards do not fit the sequence: {found}")
    for place, reward in zip(ends, turns, strict=True):
        rewards[place] += reward
    rewards[-1] += sequence.reward or 0.0
    if not all(map(math.isfinite, rewards)):
        raise ValueError("the environment's rewards are not finite")
    return rewards
