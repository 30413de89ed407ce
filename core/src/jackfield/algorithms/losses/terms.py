"""What a registered loss returns, and log-ratios."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import attrs

if TYPE_CHECKING:
    from torch import Tensor

#: Name to a value (or bool) per token ``[B, T]``, averaged over tokens, or per row ``[B]``, averaged over sequences.
Metrics: TypeAlias = Mapping[str, "Tensor"]


@attrs.frozen(kw_only=True, eq=False)
class Term:
    """A summand of a loss: ``values`` per token ``[B, T]``, or one per sequence ``[B]``."""

    values: Tensor
    weight: float = 1.0
    mask: Tensor | None = None  #: None: the response mask
    counts: Mapping[str, float] = attrs.field(factory=dict)  #: of the whole batch, where they differ


#: Values per token ``[B, T]``, one per sequence ``[B]``, or several terms; and metrics.
LossResult: TypeAlias = "tuple[Tensor | tuple[Term, ...], Metrics]"

#: Bound of a log-ratio before it is exponentiated: e^20 is far outside of any trust region, and finite in float32.
CLAMP = 20.0


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(pi / pi_old) per token, within ±20."""
    return (log_probs - old_log_probs).clamp(-CLAMP, CLAMP)


def row_log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """Return log(pi(y) / pi_old(y)) per row, ``[B]``; both are 0 where the mask is 0."""
    return (log_probs - old_log_probs).sum(-1)
