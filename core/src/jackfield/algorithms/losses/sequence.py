"""Policy losses with a ratio per sequence: its log is the sum over the model tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.losses.terms import CLAMP, LossResult, log_ratio, row_log_ratio
from jackfield.algorithms.options import NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import row_means

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "gspo", "sequence")
def _gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: Share = 3e-4,
    clip_high: NotNegative = 4e-4,
) -> LossResult:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (pi(y) / pi_old(y))^(1 / |y|), on each token of y. [GSPO,
    arXiv:2507.18071]

    Differs: verl aggregates it by seq-mean-token-mean whatever is configured; here the configuration holds (the bundle
    asks for seq-mean-token-mean, as the paper does).
    """
    mean = row_means(log_probs - old_log_probs, response_mask).clamp(-CLAMP, CLAMP)
    ratio = mean.exp().unsqueeze(-1).expand(log_probs.shape)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return unclipped.maximum(clipped), {"policy/clip_fraction": clipped > unclipped, "policy/ratio": ratio}


@register("loss", "gmpo", "sequence", per_sequence=True)
def _gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: NotNegative = 0.4,
    clip_high: NotNegative = 0.4,
) -> LossResult:
    """-A (prod_t c_t)^(1 / |y|), c = min(r, clip(r)) where A > 0 and max(r, clip(r)) where A < 0, clip to [e^-clip_low,
    e^clip_high]. [GMPO, arXiv:2507.20673]

    A is the mean of the row's advantages. One value per sequence.

    Differs: One value per sequence, averaged over the global count of sequences (verl: over the micro-batch). An empty
    response gives 0.
    """
    advantage = row_means(advantages, response_mask)
    sign = advantage.sign().unsqueeze(-1)
    logs = log_probs - old_log_probs
    bounded = sign * (sign * logs).minimum(sign * logs.clamp(-clip_low, clip_high))
    ratio = row_means(bounded, response_mask).clamp(-CLAMP, CLAMP).exp()
    return -advantage * ratio, {"policy/clip_fraction": bounded != logs, "policy/ratio": ratio}


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
    gain = advantages * log_probs
    if level == "token":
        logs = log_ratio(log_probs, old_log_probs)
    else:
        gain, logs = gain.sum(-1), row_log_ratio(log_probs, old_log_probs)
    return -gain + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}
