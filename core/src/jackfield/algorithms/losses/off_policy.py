"""Policy-gradient losses without a clipped ratio: -A log pi and what regularises it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.losses.terms import LossResult, log_ratio
from jackfield.algorithms.options import NotNegative, Positive, Share
from jackfield.algorithms.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "reinforce", "token")
def _reinforce(log_probs: Tensor, advantages: Tensor) -> LossResult:
    """-A log pi. [Williams, 1992]"""
    return -advantages * log_probs, {}


@register("loss", "gpg", "token")
def _gpg(log_probs: Tensor, advantages: Tensor) -> LossResult:
    """-A log pi: what is special in GPG is its advantages. [GPG, arXiv:2504.02546]"""
    return -advantages * log_probs, {}


@register("loss", "sppo", "token")
def _sppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, epsilon: Positive = 0.3) -> LossResult:
    """-A log(clip(r, 1 / (1 + epsilon), 1 + epsilon)). [Vaswani et al., arXiv:2108.05828 (softmax PPO)]"""
    bound = math.log1p(epsilon)
    logs = log_probs - old_log_probs
    clipped = logs.clamp(-bound, bound)
    return -advantages * clipped, {"policy/clip_fraction": clipped != logs}


@register("loss", "rec", "token")
def _rec(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip: Literal["none", "one-side", "two-side", "ring"] = "one-side",
    weight: Literal["none", "importance", "advantage"] = "none",
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    ring_low: NotNegative = 0.6,
    ring_high: NotNegative = 2.0,
    temperature: Positive = 1.0,
    regularizer: Literal["none", "k2", "forward_kl"] = "none",
    regularizer_coefficient: NotNegative = 0.0,
) -> LossResult:
    """-M w A log pi + regulariser; M keeps r within bounds, w is 1, r (no gradient) or exp(A / temperature). [Yao et
    al., arXiv:2509.24203 (REC family, RED-Weight, and OPMD's and AsymRE's regularisers)]

    ``clip``: ``two-side`` keeps 1 - clip_low <= r <= 1 + clip_high; ``one-side`` bounds r from above for A >= 0 and
    from below for A <= 0; ``ring`` is two-side and, beyond, r <= 1 - ring_low for A >= 0 and r >= 1 + ring_high for
    A <= 0. ``regularizer``: ``k2`` adds coefficient (log r)^2, ``forward_kl`` adds -coefficient log pi.

    Differs: Rows that RED-Drop leaves out are the estimator's business, not the loss's.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    low, high = ratio >= 1.0 - clip_low, ratio <= 1.0 + clip_high
    up, down = advantages >= 0, advantages <= 0
    kept = {
        "none": ratio > 0,
        "two-side": low & high,
        "one-side": (up & high) | (down & low),
        "ring": (low & high) | (up & (ratio <= 1.0 - ring_low)) | (down & (ratio >= 1.0 + ring_high)),
    }[clip]
    gain = advantages
    if weight == "importance":
        gain = advantages * ratio
    elif weight == "advantage":
        gain = advantages * (advantages / temperature).clamp(max=20.0).exp()
    losses = -(gain * log_probs).masked_fill(~kept, 0.0)
    if regularizer == "k2":
        losses = losses + regularizer_coefficient * (log_probs - old_log_probs).square()
    elif regularizer == "forward_kl":
        losses = losses - regularizer_coefficient * log_probs
    return losses, {"policy/clip_fraction": ~kept, "policy/ratio": ratio}
