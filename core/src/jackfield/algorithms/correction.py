"""Off-policy correction, for a trained policy that differs from the one that generated.

The causes are numerics, stale weights and replayed data. *Decoupled*, it weighs by pi_old / pi_rollout and the loss
clips around pi_old. In *bypass* mode pi_rollout is used as pi_old: the loss's ratio corrects; only rejection is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs
from attrs.validators import ge, gt

from jackfield.algorithms.options import above
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import CLAMP, clean, masked_mean_std, row_means
from jackfield.settings import option

if TYPE_CHECKING:
    from torch import Tensor


@register("correction", "importance_weights", "token", batch_options={"batch_normalize": True})
@attrs.frozen(kw_only=True)
class Correction:
    """w_t = rho_t = pi_t / pi_rollout_t, or of the sequence prod(rho), bounded; and a mask without what is rejected.
    [TIS: Yao et al., fengyao.notion.site/off-policy-rl, 2025; MIS: Liu, Li et al., richardli.xyz/rl-collapse, 2025;
    IcePop: Ring-1T, arXiv:2510.18855]

    Differs: IcePop's published bounds are 0.5 and 5; the default upper bound here is 2 for all forms. Weights carry no
    gradient.
    """

    enabled: bool | None = option(
        None,
        "null: on if the rollout server's log-probs differ from the engine's by more than rounding, and with "
        "sampling filters (top_p, top_k, min_p)",
    )
    level: Literal["token", "sequence", "geometric"] = option(
        "token", "a ratio per token, of the whole response, or of the response's geometric mean"
    )
    bound: Literal["truncate", "icepop", "none"] = option(
        "truncate", "truncate: at most upper; icepop: 0 outside of [lower, upper]"
    )
    upper: float = option(2.0, "largest weight", [gt(0.0), above("lower")])
    lower: float = option(0.5, "smallest weight, for icepop", ge(0.0))
    reject: Literal["none", "token", "sequence-sum", "sequence-mean", "sequence-max"] = option(
        "none", "exclude tokens, or whole responses, whose ratio is outside of [reject_low, reject_high]"
    )
    reject_low: float = option(0.5, "lower bound of a ratio that is kept", ge(0.0))
    reject_high: float = option(2.0, "upper bound of a ratio that is kept", above("reject_low"))
    batch_normalize: bool = option(False, "divide by the batch's mean weight")

    def weights(
        self, log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute importance weights and the mask of accepted tokens.

        Levels: ``sequence`` is prod(rho) on each token, ``geometric`` prod(rho)^(1 / length). Bounds: ``truncate`` is
        min(w, upper) (TIS). Rejection (MIS): ``token`` rejects tokens whose rho is outside of [reject_low,
        reject_high]; ``sequence-sum``, ``sequence-mean`` and ``sequence-max`` reject whole sequences whose prod(rho),
        prod(rho)^(1 / length) or any rho is outside. ``batch_normalize`` divides by the mean weight of the accepted
        tokens, or of the sequences that have any, which needs the whole batch.

        Args:
            log_probs: Log-probs of pi_old (decoupled PPO) or pi (policy gradient), float ``[B, T]``.
            rollout_log_probs: Log-probs of the policy that generated, float ``[B, T]``.
            response_mask: Bool or float ``[B, T]``.

        Returns:
            ``(weights, mask, diagnostics)``: float ``[B, T]`` without gradient, 0 where the response mask is 0; the
            response mask (its dtype) with 0 for rejected tokens, which the loss excludes while its counts do not
            change; scalars: ``mean``, ``std``, ``min``, ``max`` of the bounded weights, ``effective_sample_size``
            ((sum w)^2 / (n sum w^2)), ``fraction_high`` and ``fraction_low`` (ratios beyond the bounds),
            ``fraction_rejected`` (tokens), ``kl`` and ``kl_k3`` (of pi_rollout from pi: means of -log rho and of
            rho - 1 - log rho), ``batch_norm``. Errors are ``algorithm.input`` and ``algorithm.not-finite``.
        """
        tensors = {"log_probs": log_probs.detach(), "rollout_log_probs": rollout_log_probs.detach()}
        own, rollout = clean(tensors, response_mask).values()
        keep, logs = response_mask != 0, own - rollout
        weights = raw = _ratio(logs, keep, self.level)
        if self.bound == "truncate":
            weights = raw.clamp(max=self.upper)
        elif self.bound == "icepop":
            weights = raw.masked_fill((raw < self.lower) | (raw > self.upper), 0.0)
        weights = weights.masked_fill(~keep, 0.0)
        accepted = self._accepted(logs, keep)
        diagnostics = self._diagnostics(logs, raw, weights, keep, accepted)
        if self.batch_normalize:  # to a mean of 1 over accepted tokens or sequences; weights that are all 0 stay so
            parts = (weights, accepted) if self.level == "token" else (row_means(weights, accepted), accepted.any(-1))
            diagnostics["batch_norm"] = mean = masked_mean_std(*parts)[0].to(weights.dtype)
            weights = weights / mean.where(mean > 0, mean.new_ones(()))
        return weights, response_mask.masked_fill(~accepted, 0), diagnostics

    def _accepted(self, logs: Tensor, keep: Tensor) -> Tensor:
        """Return the accepted model tokens, bool ``[B, T]``."""
        if self.reject == "none":
            return keep
        levels = {"sequence-sum": "sequence", "sequence-mean": "geometric"}
        ratio = _ratio(logs, keep, levels.get(self.reject, "token"))
        inside = (ratio >= self.reject_low) & (ratio <= self.reject_high)
        return keep & ((inside | ~keep).all(-1, keepdim=True) if self.reject == "sequence-max" else inside)

    def _diagnostics(
        self, logs: Tensor, raw: Tensor, weights: Tensor, keep: Tensor, accepted: Tensor
    ) -> dict[str, Tensor]:
        """Return diagnostics over the model tokens; 0 for a batch without any."""
        count = keep.sum().clamp(min=1)
        mean, deviation = masked_mean_std(weights, keep)
        wide, bounded = weights.double(), logs.clamp(-CLAMP, CLAMP)
        kept = wide[keep] if bool(keep.any()) else mean.reshape(1)
        return {
            "mean": mean,
            "std": deviation,
            "min": kept.amin(),
            "max": kept.amax(),
            "effective_sample_size": wide.sum().square() / (count * wide.square().sum()).clamp(min=1e-30),
            "fraction_high": ((raw > self.upper) & keep).sum() / count,
            "fraction_low": ((raw < self.lower) & keep).sum() / count,
            "fraction_rejected": (keep & ~accepted).sum() / count,
            "kl": masked_mean_std(-logs, keep)[0],
            "kl_k3": masked_mean_std(bounded.expm1() - bounded, keep)[0],
        }


def _ratio(logs: Tensor, keep: Tensor, level: str) -> Tensor:
    """Return rho of each token, prod(rho) of its sequence, or that to the power of 1 / length; ``[B, T]``."""
    if level != "token":
        rows = logs.sum(-1) if level == "sequence" else row_means(logs, keep)
        logs = rows.unsqueeze(-1).expand(logs.shape)
    return logs.clamp(-CLAMP, CLAMP).exp()
