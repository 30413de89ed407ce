"""How observers find the reward, the loss and the score among a run's metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["LOSS", "REWARD", "SAMPLES", "SAMPLES_PER_SECOND", "SCORE", "find", "pick", "shown"]

#: Names under which a step or an evaluation may report a quantity, the preferred one first.
REWARD = ("reward", "reward/mean", "reward_mean", "rewards/mean")
LOSS = ("loss", "policy/loss", "loss/mean", "loss/total")
SCORE = ("accuracy", "accuracy/mean", "exact_match", "score", "score/mean", *REWARD)
SAMPLES_PER_SECOND = ("samples_per_second", "throughput/samples_per_second")
SAMPLES = ("samples", "batch/samples")


def find(metrics: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The key of the first metric of one of the ``names``, also behind a prefix (``train/reward``), if there is one."""
    for name in names:
        if name in metrics:
            return name
    return next((key for name in names for key in metrics if key.endswith(f"/{name}")), None)


def pick(metrics: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """The value of the metric that :func:`find` finds; None when there is none or when it was not finite."""
    key = find(metrics, names)
    return None if key is None else metrics[key]


def shown(key: str) -> str:
    """A metric's name for people: ``reward`` for ``train/reward/mean``."""
    return key.removesuffix("/mean").rpartition("/")[2]
