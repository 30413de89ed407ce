"""Policy losses with a trust region around the old policy, by clipping or by excluding tokens.

r = pi / pi_old on a token, A is the advantage; the log-probability of a sequence is the sum over its model tokens.
Tokens are excluded by their divergence or by a selection over the whole batch: Clip-Cov and KL-Cov restrain the few
tokens whose covariance reduces entropy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

from jackfield.algorithms.registry import ClipDual, Inputs, NotNegative, Positive, Share, above, register
from jackfield.algorithms.tensors import CLAMP, LossResult, log_ratio, masked_mean_std, row_means

if TYPE_CHECKING:
    from torch import Tensor


def surrogate(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) and its metrics.

    For A < 0 the minimum is never below clip_dual A. The loss is -A r with r bounded from above if A > 0 and from below
    if A < 0, where the dual clip bounds it from above: one product for both signs saves memory for the gradient.
    """
    losing, fixed = advantages < 0, ratio.detach()
    bounded = ratio.clamp(1.0 - clip_low, clip_dual).where(losing, ratio.clamp(max=1.0 + clip_high))
    clipped = (losing & (fixed < 1.0 - clip_low)) | ((advantages > 0) & (fixed > 1.0 + clip_high))
    metrics = {"policy/clip_fraction": clipped, "policy/ratio": fixed}
    if clip_dual is not None:
        metrics["policy/dual_clip_fraction"] = losing & (fixed > clip_dual)
    return -advantages * bounded, metrics


@register("loss", "ppo", "token", "old_log_probs advantages")
def ppo(
    x: Inputs, *, clip_low: Share = 0.2, clip_high: NotNegative = 0.2, clip_dual: ClipDual | None = 3.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old; for A < 0 never below clip_dual A. [PPO,
    arXiv:1707.06347; dual clip: arXiv:1912.09729; asymmetric: arXiv:2503.14476]

    ``clip_dual=None`` switches the dual clip off. log r is kept within ±20.
    """
    logs = x.log_probs - x.old_log_probs
    losses, metrics = surrogate(logs.clamp(-CLAMP, CLAMP).exp(), x.advantages, clip_low, clip_high, clip_dual)
    return losses, {**metrics, "policy/approx_kl": (metrics["policy/ratio"] - 1.0).sub_(logs.detach())}


@register("loss", "decoupled_ppo", "token", "old_log_probs rollout_log_probs advantages")
def _decoupled_ppo(
    x: Inputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_dual: ClipDual | None = None,
    weight_cap: Positive | None = None,
) -> LossResult:
    """-w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), r = pi / pi_old, w = pi_old / pi_rollout (no gradient).
    [Hilton et al., arXiv:2110.00641; AReaL, arXiv:2505.24298]

    There are three policies: pi_rollout generated, pi_old anchors the trust region, and pi is trained. Tokens with
    w > weight_cap are excluded.

    Differs: The weight has no cap by default, as in the paper's objective.
    """
    losses, metrics = ppo(x, clip_low=clip_low, clip_high=clip_high, clip_dual=clip_dual)
    metrics["policy/rollout_weight"] = weights = log_ratio(x.old_log_probs, x.rollout_log_probs).detach().exp()
    if weight_cap is not None:
        weights = weights.masked_fill(weights > weight_cap, 0.0)
    return losses * weights, metrics


@register("loss", "gspo", "sequence", "old_log_probs advantages")
def _gspo(x: Inputs, *, clip_low: Share = 3e-4, clip_high: NotNegative = 4e-4) -> LossResult:
    """-min(s A, clip(s, 1 - clip_low, 1 + clip_high) A), s = (pi(y) / pi_old(y))^(1 / |y|), on each token of y. [GSPO,
    arXiv:2507.18071]

    Differs: verl always aggregates it by seq-mean-token-mean; here the configuration decides (the bundle uses
    seq-mean-token-mean, as the paper does).
    """
    mean = row_means(x.log_probs - x.old_log_probs, x.response_mask).clamp(-CLAMP, CLAMP)
    return surrogate(mean.exp().unsqueeze(-1).expand(x.log_probs.shape), x.advantages, clip_low, clip_high)


@register("loss", "gmpo", "sequence", "old_log_probs advantages", per_sequence=True)
def _gmpo(x: Inputs, *, clip_low: NotNegative = 0.4, clip_high: NotNegative = 0.4) -> LossResult:
    """-A (prod_t c_t)^(1 / |y|), c = min(r, clip(r)) where A > 0 and max(r, clip(r)) where A < 0, clip to [e^-clip_low,
    e^clip_high]. [GMPO, arXiv:2507.20673]

    A is the mean of the row's advantages. The loss has one value per sequence.

    Differs: We average over the global count of sequences (verl: over the micro-batch). An empty response gives 0.
    """
    advantage = row_means(x.advantages, x.response_mask)
    sign = advantage.sign().unsqueeze(-1)
    logs = x.log_probs - x.old_log_probs
    bounded = sign * (sign * logs).minimum(sign * logs.clamp(-clip_low, clip_high))
    ratio = row_means(bounded, x.response_mask).clamp(-CLAMP, CLAMP).exp()
    return -advantage * ratio, {"policy/clip_fraction": bounded != logs, "policy/ratio": ratio}


@register("loss", "sapo", "token", "old_log_probs advantages")
def _sapo(x: Inputs, *, tau_pos: Positive = 1.0, tau_neg: Positive = 1.05) -> LossResult:
    """-f(r) A, f(r) = 4 / tau sigmoid(tau (r - 1)), tau = tau_pos where A > 0 and tau_neg elsewhere. [SAPO,
    arXiv:2511.20347]

    A soft gate replaces clipping; f'(1) = 1.

    Differs: verl always aggregates it by seq-mean-token-mean; here the configuration decides.
    """
    ratio = log_ratio(x.log_probs, x.old_log_probs).exp()
    positive, negative = ((tau * (ratio - 1.0)).sigmoid() * (4.0 / tau) for tau in (tau_pos, tau_neg))
    return -positive.where(x.advantages > 0, negative) * x.advantages, {"policy/ratio": ratio}


@register("loss", "sppo", "token", "old_log_probs advantages")
def _sppo(x: Inputs, *, epsilon: Positive = 0.3) -> LossResult:
    """-A log(clip(r, 1 / (1 + epsilon), 1 + epsilon)). [Vaswani et al., arXiv:2108.05828 (softmax PPO)]"""
    bound, logs = math.log1p(epsilon), x.log_probs - x.old_log_probs
    clipped = logs.clamp(-bound, bound)
    return -x.advantages * clipped, {"policy/clip_fraction": clipped != logs}


def _without(left_out: Tensor, ratio: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return -M r A, which gives excluded tokens no loss and no gradient."""
    metrics = {"policy/clip_fraction": left_out, "policy/ratio": ratio}
    return -(ratio * advantages).masked_fill(left_out, 0.0), metrics


def _outward(logs: Tensor, advantages: Tensor, up: Tensor | bool = True, down: Tensor | bool = True) -> Tensor:
    """Return the tokens that the update moves away from pi_old: upwards where ``up``, downwards where ``down``."""
    return ((advantages > 0) & (logs > 0) & up) | ((advantages < 0) & (logs < 0) & down)


def _dppo(name: str, delta: float, text: str, divergence: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Register DPPO's loss with a divergence of the log-probs ``[B, T]`` of pi and pi_old, and a threshold."""

    def loss(x: Inputs, *, delta_low: NotNegative = delta, delta_high: NotNegative = delta) -> LossResult:
        apart = divergence(x.log_probs.detach(), x.old_log_probs.detach())
        logs = log_ratio(x.log_probs, x.old_log_probs)
        left_out = _outward(logs, x.advantages, apart > delta_high, apart > delta_low)
        losses, metrics = _without(left_out, logs.exp(), x.advantages)
        return losses, {**metrics, "policy/divergence": apart}

    differs = (
        "The paper's masked objective M r A; verl cuts r at 20 and multiplies by log pi: the same gradient below 20. "
        "The default thresholds are ours: set them."
    )
    loss.__doc__ = f"{text}\n\nDiffers: {differs}"
    register("loss", name, "token", "old_log_probs advantages")(loss)


def _bernoulli_kl(new: Tensor, old: Tensor) -> Tensor:
    """Return D = pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi))."""
    # if a probability rounds to 1, the other outcomes have probability 0
    others_new, others_old = ((-logs.expm1()).clamp(min=1e-12).log() for logs in (new, old))
    return old.exp() * (old - new) + (-old.expm1()) * (others_old - others_new)


_dppo(
    "dppo_tv",
    0.2,
    "-M r A, M = 0 where |pi - pi_old| > delta and the update leads away (A > 0 and r > 1; A < 0 and r < 1). [DPPO, "
    "arXiv:2602.04879 (binary total variation)]",
    lambda new, old: (new.exp() - old.exp()).abs(),
)
_dppo(
    "dppo_kl",
    0.05,
    "-M r A, M = 0 where the update leads farther away and D > delta: the KL between the Bernoulli variables "
    '"this token or another". [DPPO, arXiv:2602.04879 (binary KL)]',
    _bernoulli_kl,
)


@register("preparation", "m2po", "batch", "old_log_probs advantages m2_threshold")
def _m2po_mask(x: Inputs) -> dict[str, Tensor]:
    """Return a mask that is 1 on kept tokens, ``[B, T]``."""
    logs, mask = x.log_probs - x.old_log_probs, x.response_mask != 0
    candidates = _outward(logs, x.advantages) & mask
    ordered, order = logs.double().square()[candidates].sort(stable=True)
    count = ordered.new_ones(len(ordered)).cumsum(0)
    within = ordered.cumsum(0) / count <= x.m2_threshold  # prefix means of ascending values ascend
    mask[candidates] = within.new_zeros(len(ordered)).scatter(0, order, within)
    return {"m2po_mask": mask}


@register("loss", "m2po", "batch", "old_log_probs advantages", whole_batch=("m2po_mask",))
def _m2po(x: Inputs, *, m2_threshold: NotNegative = 0.04) -> LossResult:
    """-M r A; M leaves out the largest (log r)^2 among outward tokens until the mean of the others is <= m2_threshold.
    [M2PO, arXiv:2510.01161, algorithm 1]

    Outward tokens have A > 0 and r > 1, or A < 0 and r < 1. Excluded tokens still count in the mean.

    Differs: We use one mask for the whole batch, however it is split.
    """
    return _without(x.m2po_mask == 0, log_ratio(x.log_probs, x.old_log_probs).exp(), x.advantages)


def _covariance(x: Inputs) -> Tensor:
    """Return (log pi - mean) (A - mean) per token, with means over the batch's model tokens."""
    logs, gains, keep = x.log_probs.double(), x.advantages.double(), x.response_mask != 0
    covariance: Tensor = (logs - masked_mean_std(logs, keep)[0]) * (gains - masked_mean_std(gains, keep)[0])
    return covariance


_CLIP_COV = "clip_low clip_high clip_cov_ratio clip_cov_lower clip_cov_upper seed"


@register("preparation", "clip_cov", "batch", f"old_log_probs advantages {_CLIP_COV}")
def _clip_cov_mask(x: Inputs) -> dict[str, Tensor]:
    """Return a mask that is 1 on tokens without gradient, ``[B, T]``."""
    import torch

    keep, covariance = x.response_mask != 0, _covariance(x)
    r = log_ratio(x.log_probs, x.old_log_probs).exp()
    clipped = r.clamp(1.0 - x.clip_low, 1.0 + x.clip_high) * x.advantages < r * x.advantages
    inside = (covariance > x.clip_cov_lower) & (covariance < x.clip_cov_upper)
    candidates = (keep & ~clipped & inside).nonzero()
    wanted = max(int(x.clip_cov_ratio * int(keep.sum())), 1)
    generator = torch.Generator().manual_seed(x.seed)
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:wanted].to(candidates.device)]
    mask = torch.zeros_like(keep)
    mask[chosen[:, 0], chosen[:, 1]] = True
    return {"clip_cov_mask": mask}


@register("loss", "clip_cov", "batch", "old_log_probs advantages", whole_batch=("clip_cov_mask",))
def _clip_cov(
    x: Inputs,
    *,
    clip_low: Share = 0.2,
    clip_high: NotNegative = 0.2,
    clip_cov_ratio: Share = 0.0002,
    clip_cov_lower: float = 1.0,
    clip_cov_upper: Annotated[float, above("clip_cov_lower")] = 5.0,
    seed: int = 0,
) -> LossResult:
    """PPO's loss, 0 for a random clip_cov_ratio of the tokens, drawn among those of clip_cov_lower < Cov <
    clip_cov_upper. [Cui et al., arXiv:2505.22617, Clip-Cov]

    Cov_t = (log pi_t - mean(log pi)) (A_t - mean(A)). Tokens that PPO clips are not candidates; at least one token is
    drawn if there is a candidate. ``seed`` should change from step to step.

    Differs: verl computes means and selection per micro-batch; we use the whole batch.
    """
    losses, metrics = ppo(x, clip_low=clip_low, clip_high=clip_high, clip_dual=None)
    cut = x.clip_cov_mask != 0
    return losses.masked_fill(cut, 0.0), {**metrics, "policy/cov_fraction": cut}


@register("preparation", "kl_cov", "batch", "advantages kl_cov_ratio")
def _kl_cov_mask(x: Inputs) -> dict[str, Tensor]:
    """Return a mask that is 1 on the tokens with the largest covariance, ``[B, T]``."""
    keep = x.response_mask != 0
    covariance = _covariance(x).masked_fill(~keep, float("-inf")).flatten()
    tokens = int(keep.sum())
    mask = keep.new_zeros(keep.numel())
    mask[covariance.topk(min(max(int(x.kl_cov_ratio * tokens), 1), tokens)).indices] = True
    return {"kl_cov_mask": mask.reshape(keep.shape)}


@register("loss", "kl_cov", "batch", "old_log_probs advantages", whole_batch=("kl_cov_mask",))
def _kl_cov(x: Inputs, *, kl_cov_ratio: Share = 0.0002, kl_coefficient: NotNegative = 1.0) -> LossResult:
    """-r A, plus kl_coefficient |log r| on the kl_cov_ratio of the tokens with the largest Cov (see clip_cov), at least
    one. [Cui et al., arXiv:2505.22617, KL-Cov]

    Differs: verl computes means and selection per micro-batch; we use the whole batch. The penalty |log r| is that of
    the authors' code.
    """
    logs, penalised = log_ratio(x.log_probs, x.old_log_probs), x.kl_cov_mask != 0
    losses = -logs.exp() * x.advantages + kl_coefficient * logs.abs().masked_fill(~penalised, 0.0)
    return losses, {"policy/cov_fraction": penalised, "policy/ratio": logs.exp()}
