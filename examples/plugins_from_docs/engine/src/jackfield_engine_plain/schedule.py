"""The learning-rate schedule of an :class:`~jackfield.abc.engine.OptimizerSpec`."""

from __future__ import annotations

import math

from jackfield.abc.engine import OptimizerSpec
from jackfield.errors import EngineError


def learning_rate(spec: OptimizerSpec, step: int) -> float:
    """The learning rate of optimizer step ``step``, the first being 0.

    Raises:
        EngineError: ``config.invalid-value`` for a decay without ``total_steps``.
    """
    if step < spec.warmup_steps:
        return spec.lr * step / spec.warmup_steps
    if spec.scheduler == "constant":
        return spec.lr
    if spec.total_steps is None:
        raise EngineError("the decay has no length", code="config.invalid-value", where="optimizer.total_steps")
    progress = min(1.0, (step - spec.warmup_steps) / max(1, spec.total_steps - spec.warmup_steps))
    rest = 1.0 - progress if spec.scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return spec.lr * (spec.min_lr_ratio + (1.0 - spec.min_lr_ratio) * rest)
