"""Policy losses with a trust region around the old policy, token by token.

r = pi / pi_old, A the advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.algorithms.losses.terms import CLAMP, LossResult, Metrics, log_ratio
from jackfield.algorithms.options import ClipDual, NotNegative, Positive, Share
from jackfield.algorithms.registry import register

if TYPE_CHECKING:
    from torch import Tensor


@register("loss", "ppo", "token")
def clipped_surrogate(
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

    ``clip_dual=None`` switches the dual clip off. log r is kept within ±20. This is -A r with r bounded from above
    where A > 0 and from below where A < 0, and the dual clip bounds it from above there: one product, whatever the
    sign, so that little is kept for the gradient.
    """
    logs = log_probs - old_log_probs
    ratio = logs.clamp(-CLAMP, CLAMP).exp()
    losing, fixed = advantages < 0, ratio.detach()
    bounded = ratio.clamp(1.0 - clip_low, clip_dual).where(losing, ratio.clamp(max=1.0 + clip_high))
    metrics = {
        "policy/clip_fraction": (losing & (fixed < 1.0 - clip_low)) | ((advantages > 0) & (fixed > 1.0 + clip_high)),
        "policy/approx_kl": (fixed - 1.0).sub_(logs.detach()),
        "policy/ratio": fixed,
    }
    if clip_dual is not None:
        metrics["policy/dual_clip_fraction"] = losing & (fixed > clip_dual)
    return -advantages * bounded, metrics


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
    losses, metrics = clipped_surrogate(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual
    )
    weights = log_ratio(old_log_probs, rollout_log_probs).detach().exp()
    metrics["policy/rollout_weight"] = weights
    if weight_cap is not None:
        weights = weights.masked_fill(weights > weight_cap, 0.0)
    return losses * weights, metrics


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
    positive = (tau_pos * (ratio - 1.0)).sigmoid() * (4.0 / tau_pos)
    negative = (tau_neg * (ratio - 1.0)).sigmoid() * (4.0 / tau_neg)
    return -positive.where(advantages > 0, negative) * advantages, {"policy/ratio": ratio}


def _without(left_out: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, Metrics]:
    """-M r A: no loss and no gradient for the tokens that are left out."""
    metrics = {"policy/clip_fraction": left_out, "policy/ratio": ratio}
    return -(ratio * advantages).masked_fill(left_out, 0.0), metrics


def _outward(logs: Tensor, advantages: Tensor, up: Tensor | bool = True, down: Tensor | bool = True) -> Tensor:
    """Tokens that the update moves farther away from pi_old: upwards where ``up`` holds, downwards where ``down``."""
    return ((advantages > 0) & (logs > 0) & up) | ((advantages < 0) & (logs < 0) & down)


def _trusted(
    logs: Tensor, advantages: Tensor, divergence: Tensor, delta_low: float, delta_high: float
) -> tuple[Tensor, Metrics]:
    left_out = _outward(logs, advantages, divergence > delta_high, divergence > delta_low)
    losses, metrics = _without(left_out, logs.exp(), advantages)
    return losses, {**metrics, "policy/divergence": divergence}


@register("loss", "dppo_tv", "token")
def _dppo_tv(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    delta_low: NotNegative = 0.2,
    delta_high: NotNegative = 0.2,
) -> LossResult:
    """-M r A, M = 0 where |pi - pi_old| > delta and the update leads away (A > 0 and r > 1; A < 0 and r < 1). [DPPO,
    arXiv:2602.04879 (binary total variation)]

    Differs: The paper's masked objective M r A; verl cuts r at 20 and multiplies by log pi: the same gradient below 20.
    The default thresholds are ours: set them.
    """
    distance = (log_probs.detach().exp() - old_log_probs.exp()).abs()
    return _trusted(log_ratio(log_probs, old_log_probs), advantages, distance, delta_low, delta_high)


@register("loss", "dppo_kl", "token")
def _dppo_kl(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    delta_low: NotNegative = 0.05,
    delta_high: NotNegative = 0.05,
) -> LossResult:
    """-M r A, M = 0 where the update leads farther away and D > delta: the KL between the Bernoulli variables "this
    token or another". [DPPO, arXiv:2602.04879 (binary KL)]

    D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)).

    Differs: The paper's masked objective M r A; verl cuts r at 20 and multiplies by log pi: the same gradient below 20.
    The default thresholds are ours: set them.
    """
    new, old = log_probs.detach(), old_log_probs.detach()
    tiny = 1e-12  # a probability that rounds to 1 leaves 0 for the others
    others_new = (-new.expm1()).clamp(min=tiny).log()
    others_old = (-old.expm1()).clamp(min=tiny).log()
    divergence = old.exp() * (old - new) + (-old.expm1()) * (others_old - others_new)
    return _trusted(log_ratio(log_probs, old_log_probs), advantages, divergence, delta_low, delta_high)


def _m2po_mask(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, response_mask: Tensor, m2_threshold: float
) -> dict[str, Tensor]:
    """Mark the tokens that are kept by 1, ``[B, T]``."""
    logs = log_probs - old_log_probs
    candidates = _outward(logs, advantages) & (response_mask != 0)
    moments = logs.double().square()[candidates]
    ordered, order = moments.sort(stable=True)
    count = ordered.new_ones(len(ordered)).cumsum(0)
    within = ordered.cumsum(0) / count <= m2_threshold  # prefix means of ascending values ascend
    mask = (response_mask != 0).clone()
    mask[candidates] = within.new_zeros(len(ordered)).scatter(0, order, within)
    return {"m2po_mask": mask}


@register("loss", "m2po", "batch", whole_batch=("m2po_mask",), prepare=_m2po_mask)
def _m2po(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    m2po_mask: Tensor,
    *,
    m2_threshold: NotNegative = 0.04,
) -> LossResult:
    """-M r A; M leaves out the largest (log r)^2 among outward tokens until the mean of the others is <= m2_threshold.
    [M2PO, arXiv:2510.01161, algorithm 1]

    Outward: A > 0 and r > 1, or A < 0 and r < 1. Left-out tokens still count in the mean.

    Differs: One mask for the whole batch, however it is split.
    """
    return _without(m2po_mask == 0, log_ratio(log_probs, old_log_probs).exp(), advantages)
