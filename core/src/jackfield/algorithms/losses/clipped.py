"""Policy losses with a trust region around the old policy, by token or by sequence.

r = pi / pi_old on a token, A the advantage; the log-probability of a sequence is the sum over its model tokens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jackfield.algorithms.options import ClipDual, NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import CLAMP, LossResult, log_ratio, row_means

if TYPE_CHECKING:
    from torch import Tensor


def surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), for A < 0 never below clip_dual A; and its metrics.

    This is -A r with r bounded from above where A > 0 and from below where A < 0, and the dual clip bounds it from
    above there: one product, whatever the sign, so that little is kept for the gradient.
    """
    losing, fixed = advantages < 0, ratio.detach()
    bounded = ratio.clamp(1.0 - clip_low, clip_dual).where(losing, ratio.clamp(max=1.0 + clip_high))
    clipped = (losing & (fixed < 1.0 - clip_low)) | ((advantages > 0) & (fixed > 1.0 + clip_high))
    metrics = {"policy/clip_fraction": clipped, "policy/ratio": fixed}
    if clip_dual is not None:
        metrics["policy/dual_clip_fraction"] = losing & (fixed > clip_dual)
    return -advantages * bounded, metrics


@register("loss", "ppo", "token")
def ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old; for A < 0 never below clip_dual A. [PPO,
    arXiv:1707.06347; dual clip: arXiv:1912.09729; asymmetric: arXiv:2503.14476]

    ``clip_dual=None`` switches the dual clip off. log r is kept within ±20.
    """
    logs = log_probs - old_log_probs
    losses, metrics = surrogate(logs.clamp(-CLAMP, CLAMP).exp(), advantages, clip_low, clip_high, clip_dual)
    return losses, {**metrics, "policy/approx_kl": (metrics["policy/ratio"] - 1.0).sub_(logs.detach())}


@register("loss", "decoupled_ppo", "token")
def _decoupled_ppo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    rollout_log_probs: Tensor,
    advantages: Tensor,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = None,
    weight_cap: Positive | None = None,
) -> LossResult:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old, w = pi_old / pi_rollout (no gradient).
    [Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298]

    Three policies: pi_rollout generated, pi_old anchors the trust region, pi is trained. Tokens of w > weight_cap are
    left out.

    Differs: The weight has no cap unless one is set: that is the paper's objective.
    """
    clips: dict[str, Any] = {"clip_low": clip_low, "clip_high": clip_high, "clip_dual": clip_dual}
    losses, metrics = ppo(log_probs, old_log_probs, advantages, **clips)
    metrics["policy/rollout_weight"] = weights = log_ratio(old_log_probs, rollout_log_probs).detach().exp()
    if weight_cap is not None:
        weights = weights.masked_fill(weights > weight_cap, 0.0)
    return losses * weights, metrics


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
    return surrogate(mean.exp().unsqueeze(-1).expand(log_probs.shape), advantages, clip_low, clip_high)


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


@register("loss", "sapo", "token")
def _sapo(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05
) -> LossResult:
    """-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere. [SAPO,
    arXiv:2511.20347]

    A soft gate in the place of clipping; f'(1) = 1.

    Differs: verl aggregates it by seq-mean-token-mean whatever is configured; here the configuration holds.
    """
    ratio = log_ratio(log_probs, old_log_probs).exp()
    positive, negative = ((tau * (ratio - 1.0)).sigmoid() * (4.0 / tau) for tau in (tau_pos, tau_neg))
    return -positive.where(advantages > 0, negative) * advantages, {"policy/ratio": ratio}


@register("loss", "sppo", "token")
def _sppo(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, epsilon: Positive = 0.3) -> LossResult:
    """-A log(clip(r, 1 / (1 + epsilon), 1 + epsilon)). [Vaswani et al., arXiv:2108.05828 (softmax PPO)]"""
    bound, logs = math.log1p(epsilon), log_probs - old_log_probs
    clipped = logs.clamp(-bound, bound)
    return -advantages * clipped, {"policy/clip_fraction": clipped != logs}
