"""Policy losses with a ratio per sequence. The sequence's log-ratio is the sum over its model tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.losses.terms import CLAMP, LossResult, log_ratio, row_log_ratio
from jackfield.algorithms.options import NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import row_means
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = []


@register(
    "loss",
    "gspo",
    "sequence",
    paper="GSPO, arXiv:2507.18071",
    differs="verl aggregates it by seq-mean-token-mean whatever is configured; here the configuration holds "
    "(the bundle asks for seq-mean-token-mean, as the paper does).",
)
def _gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_low: Share = 3e-4,
    clip_high: NotNegative = 4e-4,
) -> LossResult:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (pi(y) / pi_old(y))^(1 / |y|), on each token of y."""
    mean = row_means(log_probs - old_log_probs, response_mask).clamp(-CLAMP, CLAMP)
    ratio = mean.exp().unsqueeze(-1).expand(log_probs.shape)
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    metrics = {"policy/clip_fraction": (clipped > unclipped).to(ratio.dtype), "policy/ratio": ratio}
    return unclipped.maximum(clipped), metrics


@register(
    "loss",
    "gmpo",
    "sequence",
    paper="GMPO, arXiv:2507.20673",
    differs="One value per sequence, averaged over the global count of sequences (verl: over the micro-batch). "
    "An empty response gives 0.",
    per_sequence=True,
)
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
    e^clip_high].

    A is the mean of the row's advantages. One value per sequence.
    """
    advantage = row_means(advantages, response_mask)
    sign = advantage.sign().unsqueeze(-1)
    logs = log_probs - old_log_probs
    clipped = logs.clamp(-clip_low, clip_high)
    bounded = sign * (sign * logs).minimum(sign * clipped)
    ratio = row_means(bounded, response_mask).clamp(-CLAMP, CLAMP).exp()
    metrics = {"policy/clip_fraction": (bounded != logs).to(logs.dtype), "policy/ratio": ratio}
    return -advantage * ratio, metrics


@register(
    "loss",
    "topr",
    "sequence",
    paper="TOPR, arXiv:2503.14286, canonical form",
    differs="A sequence is positive or negative by the sign of its mean advantage.",
)
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
    weight.
    """
    ratio = row_log_ratio(log_probs, old_log_probs).detach().clamp(max=CLAMP).exp().clamp(max=upper)
    positive = row_means(advantages, response_mask) > threshold
    weights = ratio.masked_fill(positive, 1.0).unsqueeze(-1)
    return -weights * advantages * log_probs, {"policy/taper": weights.squeeze(-1)}


@register(
    "loss",
    "dro",
    "sequence",
    paper="DRO, arXiv:2405.19107 (its policy objective, the value as baseline in A)",
    differs="level=token is the form that Tinker documents. The paper learns the value; here A carries any baseline.",
    per_sequence=True,
)
def _dro(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    beta: Positive = 1.0,
    level: Literal["sequence", "token"] = "sequence",
) -> LossResult:
    """-A log pi(y) + beta / 2 (log pi(y) - log pi_old(y))^2, per sequence, or per token with ``level="token"``."""
    if level == "token":
        logs = log_ratio(log_probs, old_log_probs)
        return -advantages * log_probs + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}
    if level != "sequence":
        raise ConfigError("dro has no such level", code="algorithm.input", expected="sequence or token", found=level)
    logs = row_log_ratio(log_probs, old_log_probs)
    gain = (advantages * log_probs).sum(-1)
    return -gain + 0.5 * beta * logs.square(), {"policy/log_ratio": logs}
