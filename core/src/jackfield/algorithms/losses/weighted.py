"""Policy-gradient losses -w A log pi, whose weight w has no gradient, and what regularises them.

r = pi / pi_old on a token, A the advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import CLAMP, LossResult, log_ratio, row_log_ratio, row_means

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


@register("loss", "opmd", "token")
def _opmd(log_probs: Tensor, advantages: Tensor, *, tau: NotNegative = 1.0) -> LossResult:
    """-A log pi / (1 + tau), A = R - mean_group(R). [Trinity-RFT report, arXiv:2505.17826, appendix A.3]"""
    return -advantages * log_probs / (1.0 + tau), {}


@register("loss", "cispo", "token")
def _cispo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Share = 1.0,
    clip_high: NotNegative = 0.28,
) -> LossResult:
    """-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi: the weight is clipped, no token loses its gradient.
    [MiniMax-M1, arXiv:2506.13585]

    Differs: The paper sets no lower bound and does not print its upper one: clip_low=1 is no lower bound,
    clip_high=0.28 is DAPO's.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp().detach()
    weights = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weights * advantages * log_probs, {"policy/clip_fraction": weights != ratio, "policy/ratio": ratio}


@register("loss", "topr", "sequence")
def _topr(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    threshold: float = 0.0,
    upper: Positive = 1.0,
) -> LossResult:
    """-w A log pi, w = 1 where A > threshold and sg(min(pi(y) / pi_old(y), upper)) elsewhere: the tapered importance
    weight. [TOPR, arXiv:2503.14286, canonical form]

    Differs: A sequence is positive or negative by the sign of its mean advantage.
    """
    ratio = row_log_ratio(log_probs, old_log_probs).detach().clamp(max=CLAMP).exp().clamp(max=upper)
    weights = ratio.masked_fill(row_means(advantages, response_mask) > threshold, 1.0)
    return -weights.unsqueeze(-1) * advantages * log_probs, {"policy/taper": weights}


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


@register("loss", "dro", "sequence", per_sequence=True)
def _dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    beta: Positive = 1.0,
    level: Literal["sequence", "token"] = "sequence",
) -> LossResult:
    """-A log pi(y) + beta / 2 (log pi(y) - log pi_old(y))^2, per sequence, or per token with ``level="token"``. [DRO,
    arXiv:2405.19107 (its policy objective, the value as baseline in A)]

    Differs: level=token is the form that Tinker documents. The paper learns the value; here A carries any baseline.
    """
    gain, logs = advantages * log_probs, log_ratio(log_probs, old_log_probs)
    if level == "sequence":
        gain, logs = gain.sum(-1), row_log_ratio(log_probs, old_log_probs)
    return -gain + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}
