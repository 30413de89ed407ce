"""Clip-Cov and KL-Cov hold back the few tokens whose covariance eats entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from jackfield.algorithms.losses.clipped import clipped_surrogate
from jackfield.algorithms.losses.terms import LossResult, log_ratio
from jackfield.algorithms.options import NotNegative, Share, above
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import masked_mean_std

if TYPE_CHECKING:
    from torch import Tensor


def _covariance(log_probs: Tensor, advantages: Tensor, keep: Tensor) -> Tensor:
    """(log pi - mean) (A - mean) per token, means over the batch's model tokens."""
    logs, gains = log_probs.double(), advantages.double()
    return (logs - masked_mean_std(logs, keep)[0]) * (gains - masked_mean_std(gains, keep)[0])


def _clip_cov_mask(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    clip_low: float,
    clip_high: float,
    clip_cov_ratio: float,
    clip_cov_lower: float,
    clip_cov_upper: float,
    seed: int,
) -> dict[str, Tensor]:
    """Mark the tokens whose gradient is cut by 1, ``[B, T]``."""
    import torch

    keep = response_mask != 0
    covariance = _covariance(log_probs, advantages, keep)
    r = log_ratio(log_probs, old_log_probs).exp()
    clipped = r.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages < r * advantages
    candidates = (keep & ~clipped & (covariance > clip_cov_lower) & (covariance < clip_cov_upper)).nonzero()
    wanted = max(int(clip_cov_ratio * int(keep.sum())), 1)
    generator = torch.Generator().manual_seed(seed)
    chosen = candidates[torch.randperm(len(candidates), generator=generator)[:wanted].to(candidates.device)]
    mask = torch.zeros_like(keep)
    mask[chosen[:, 0], chosen[:, 1]] = True
    return {"clip_cov_mask": mask}


@register("loss", "clip_cov", "batch", whole_batch=("clip_cov_mask",), prepare=_clip_cov_mask)
def _clip_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    clip_cov_mask: Tensor,
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

    Cov_t = (log pi_t - mean(log pi)) (A_t - mean(A)); tokens that PPO clips are no candidates; at least one token is
    drawn where there is a candidate. ``seed`` should change from step to step.

    Differs: verl takes means and selection per micro-batch; here they are those of the whole batch.
    """
    losses, metrics = clipped_surrogate(
        log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high, clip_dual=None
    )
    cut = clip_cov_mask != 0
    return losses.masked_fill(cut, 0.0), {**metrics, "policy/cov_fraction": cut}


def _kl_cov_mask(
    log_probs: Tensor, advantages: Tensor, response_mask: Tensor, kl_cov_ratio: float
) -> dict[str, Tensor]:
    """Mark the tokens of the largest covariance by 1, ``[B, T]``."""
    keep = response_mask != 0
    covariance = _covariance(log_probs, advantages, keep).masked_fill(~keep, float("-inf")).flatten()
    tokens = int(keep.sum())
    wanted = min(max(int(kl_cov_ratio * tokens), 1), tokens)
    mask = keep.new_zeros(keep.numel())
    mask[covariance.topk(wanted).indices] = True
    return {"kl_cov_mask": mask.reshape(keep.shape)}


@register("loss", "kl_cov", "batch", whole_batch=("kl_cov_mask",), prepare=_kl_cov_mask)
def _kl_cov(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    kl_cov_mask: Tensor,
    *,
    kl_cov_ratio: Share = 0.0002,
    kl_coefficient: NotNegative = 1.0,
) -> LossResult:
    """-r A, plus kl_coefficient |log r| on the kl_cov_ratio of the tokens with the largest Cov (see clip_cov), at least
    one. [Cui et al., arXiv:2505.22617, KL-Cov]

    Differs: verl takes means and selection per micro-batch; here they are those of the whole batch. The penalty
    |log r| is that of the authors' code.
    """
    logs = log_ratio(log_probs, old_log_probs)
    penalised = kl_cov_mask != 0
    losses = -logs.exp() * advantages + kl_coefficient * logs.abs().masked_fill(~penalised, 0.0)
    return losses, {"policy/cov_fraction": penalised, "policy/ratio": logs.exp()}
