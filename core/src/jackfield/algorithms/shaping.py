"""KL estimators, reward shaping before advantages are estimated, and off-policy correction after.

The correction is for a trained policy that differs from the one that generated, by numerics, stale weights or replayed
data. *Decoupled*, it weighs by pi_old / pi_rollout and the loss clips around pi_old. In *bypass* mode pi_rollout is
used as pi_old: the loss's ratio corrects; only rejection is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import attrs
from attrs.validators import ge, gt

from jackfield.algorithms.registry import Epsilon, NotNegative, above, ascending, part, register
from jackfield.algorithms.tensors import (
    CLAMP,
    Groups,
    clean,
    log_ratio,
    masked_mean_std,
    require_shapes,
    row_means,
)
from jackfield.errors import ConfigError
from jackfield.settings import option

if TYPE_CHECKING:
    from torch import Tensor


def kl(name: str, log_probs: Tensor, ref_log_probs: Tensor, *, old_log_probs: Tensor | None = None) -> Tensor:
    """Estimate the KL per token of the policy's log-probs from the reference's.

    ``name`` is ``k1``, ``k2``, ``k3``, ``abs``, ``low_var_kl``, the value of one of them with the gradient of k2
    (``k1+``, ``k3+``, ``abs+``, ``low_var_kl+``), or ``k3_corrected``, which needs the ``old_log_probs`` of the policy
    that generated. With r = pi_ref / pi and samples from pi, E[k1] = E[k3] = KL(pi, pi_ref).
    """
    offered = {"log_probs": log_probs, "ref_log_probs": ref_log_probs, "old_log_probs": old_log_probs}
    value: Tensor = part("kl", name)(offered)
    return value


def _register(name: str, text: str, estimate: Callable[[Tensor], Tensor]) -> None:
    """Register an estimator of log r, and ``NAME+``: its value with the gradient of k2."""

    def function(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        return estimate(ref_log_probs - log_probs)

    def straight_through(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
        value, gradient = (function(log_probs, ref_log_probs), 0.5 * (log_probs - ref_log_probs).square())
        return value.detach() + (gradient - gradient.detach())

    function.__doc__ = text
    register("kl", name, "token")(function)
    paper = "the gradient of k2 is the gradient of the KL in expectation: arXiv:2506.09477"
    straight_through.__doc__ = f"the value of {name} with the gradient of k2. [{paper}]"
    if name != "k2":
        register("kl", f"{name}+", "token")(straight_through)


def _k3(log_r: Tensor) -> Tensor:
    return log_r.expm1() - log_r


_PAPER = "[Schulman, Approximating KL divergence, 2020]"
_register(
    "k1",
    f"-log r = log pi - log pi_ref. Unbiased in value; in a loss its gradient is 0 in expectation. {_PAPER}",
    lambda log_r: -log_r,
)
_register(
    "k2",
    f"(log r)^2 / 2. Biased in value; its gradient is that of the KL in expectation. {_PAPER}",
    lambda log_r: 0.5 * log_r.square(),
)
_register("k3", f"r - 1 - log r. Unbiased in value, never negative. {_PAPER}", _k3)
_register("abs", "|log r|.", lambda log_r: log_r.abs())
_register(
    "low_var_kl",
    "clip(r - 1 - log r, -10, 10) with log r clipped to [-20, 20]. Beyond the bounds there is no gradient. " + _PAPER,
    lambda log_r: _k3(log_r.clamp(-CLAMP, CLAMP)).clamp(-10.0, 10.0),
)


@register("kl", "k3_corrected", "token")
def _k3_corrected(log_probs: Tensor, ref_log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """(pi / pi_old) (r - 1 - log r): unbiased, in value and gradient, for samples from pi_old. [DeepSeek-V3.2,
    arXiv:2512.02556]
    """
    return log_ratio(log_probs, old_log_probs).exp() * _k3(ref_log_probs - log_probs)


@attrs.frozen(kw_only=True)
class Shaping:
    """The settings of reward shaping: first clipping, then normalisation, then the overlong penalty."""

    clip: tuple[float, float] | None = option(None, "bounds of a response's reward; null: off", ascending)
    normalize: bool = option(False, "subtract the batch's mean and divide by the batch's standard deviation")
    overlong_length: int | None = option(
        None, "length in tokens from which the full overlong penalty applies; null: off", gt(0)
    )
    overlong_buffer: int = option(1, "tokens before overlong_length over which the penalty grows from 0", gt(0))
    overlong_factor: float = option(1.0, "full overlong penalty", ge(0.0))

    @property
    def active(self) -> bool:
        """True if any reward may change."""
        return self.clip is not None or self.normalize or self.overlong_length is not None

    def shape(self, totals: Tensor, lengths: Tensor) -> Tensor:
        """Shape the rewards of whole responses: ``totals`` float ``[B]``, ``lengths`` in tokens, int ``[B]``."""
        if self.clip is not None:
            totals = clip_rewards(totals, low=self.clip[0], high=self.clip[1])
        if self.normalize:
            totals = normalize_rewards(totals)
        if self.overlong_length is not None:
            bounds = {"max_length": self.overlong_length, "buffer": self.overlong_buffer}
            totals = totals + overlong_penalty(lengths, **bounds, factor=self.overlong_factor)
        return totals


@register("shaping", "kl_in_reward", "token")
def kl_in_reward(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    response_mask: Tensor,
    *,
    coefficient: float,
    estimator: str = "k1",
) -> tuple[Tensor, Tensor]:
    """r_t - coefficient kl_t on each model token. [InstructGPT, arXiv:2203.02155, equation 2; Ziegler et al.,
    arXiv:1909.08593]

    All tensors are ``[B, T]``; ``log_probs`` are those of the policy that generated (or of pi_old). Rewards of
    observation tokens do not change. ``estimator`` is a name of :func:`kl`.

    Returns ``(token_rewards, kl)``: ``[B, T]``, and the mean KL per model token, a scalar, to adapt the coefficient.
    """
    require_shapes({"token_rewards": token_rewards}, response_mask.shape)
    tensors = clean({"log_probs": log_probs.detach(), "ref_log_probs": ref_log_probs.detach()}, response_mask)
    keep = response_mask != 0
    penalty = kl(estimator, **tensors).masked_fill(~keep, 0.0)
    mean = masked_mean_std(penalty, keep)[0].to(penalty.dtype)
    return token_rewards - coefficient * penalty.to(token_rewards.dtype), mean


@register("shaping", "overlong_penalty", "sequence")
def overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int, factor: NotNegative = 1.0) -> Tensor:
    """factor * clip((max_length - buffer - length) / buffer, -1, 0): to be added to the reward of a response. [DAPO,
    arXiv:2503.14476, equation 13]

    ``lengths`` (int ``[B]``), ``max_length``, from which on the penalty is ``-factor``, and ``buffer``, over which it
    grows from 0, are in tokens. The result is float ``[B]``, never positive. A buffer longer than ``max_length`` is
    refused (``algorithm.input``).
    """
    if not 0 < buffer <= max_length:
        found = f"buffer {buffer}, max_length {max_length}"
        raise ConfigError("overlong_penalty needs 0 < buffer <= max_length", code="algorithm.input", found=found)
    return factor * ((max_length - buffer - lengths.float()) / buffer).clamp(-1.0, 0.0)


@register("shaping", "dynamic_sampling_filter", "group")
def dynamic_sampling_filter(scores: Tensor, group_ids: Tensor, *, min_spread: NotNegative = 0.0) -> Tensor:
    """Keep rows of groups with max(score) - min(score) > min_spread: the others give no group-relative gradient. [DAPO,
    arXiv:2503.14476, equation 11]

    ``scores`` float and ``group_ids`` int ``[B]`` give bool ``[B]``. A group of one is not kept.
    """
    groups, values = Groups(group_ids), scores.double()
    return groups.maxima(values) + groups.maxima(-values) > min_spread


@register("shaping", "normalize_rewards", "batch")
def normalize_rewards(scores: Tensor, *, center: bool = True, eps: Epsilon = 1e-8) -> Tensor:
    """(R - mean_batch(R)) / (std_batch(R) + eps), std over n - 1; ``center=False``: R / (std_batch(R) + eps).

    ``scores`` is float ``[B]``. A batch of one (or of equal rewards) becomes 0, or does not change if uncentred.
    """
    mean, deviation = masked_mean_std(scores, scores == scores)
    if center:
        return ((scores.double() - mean) / (deviation + eps)).to(scores.dtype)
    return (scores / (deviation + eps)).to(scores.dtype) if float(deviation) else scores


@register("shaping", "clip_rewards", "token")
def clip_rewards(rewards: Tensor, *, low: float, high: float) -> Tensor:
    """clip(R, low, high), any shape.

    Bounds that do not ascend are refused (``algorithm.input``).
    """
    if not low < high:
        raise ConfigError("clip_rewards needs low < high", code="algorithm.input", found=f"{low}, {high}")
    return rewards.clamp(low, high)


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
        "null: on if the rollout server's log-probs differ from the engine's by more than rounding, with sampling "
        "filters (top_p, top_k, min_p), and with schedule.mode: async",
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
    stale_only: bool = option(False, "correct only tokens of older weights than the step's; the others have weight 1")
    max_token_staleness: int | None = option(None, "exclude tokens with weights older by more steps; null: none", ge(0))

    @property
    def by_token(self) -> bool:
        """Return whether it needs the weight version of each token."""
        return self.stale_only or self.max_token_staleness is not None

    def weights(
        self, log_probs: Tensor, rollout_log_probs: Tensor, response_mask: Tensor, staleness: Tensor | None = None
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute ``(weights, mask, diagnostics)``: importance weights, and the mask of accepted tokens.

        ``truncate`` is min(w, upper) (TIS). ``sequence-sum``, ``sequence-mean`` and ``sequence-max`` reject sequences
        whose prod(rho), prod(rho)^(1 / length) or any rho is outside of the bounds (MIS). ``batch_normalize`` divides
        by the mean weight of the accepted tokens, or of the sequences that have any, which needs the whole batch.

        ``staleness`` (integers ``[B, T]``) is by how many steps the weights of each token are older than the step's.
        ``log_probs`` are those of pi_old (decoupled PPO) or pi (policy gradient), ``rollout_log_probs`` those of the
        policy that generated. The weights are float ``[B, T]`` without gradient, 0 where the response mask is 0. The
        mask is the response mask (its dtype) with 0 for rejected tokens, which the loss excludes while its counts do
        not change. The diagnostics are scalars: ``mean``, ``std``, ``min``, ``max`` of the bounded weights,
        ``effective_sample_size`` ((sum w)^2 / (n sum w^2)), ``fraction_high`` and ``fraction_low`` (ratios beyond the
        bounds), ``fraction_rejected`` (tokens), ``kl`` and ``kl_k3`` (of pi_rollout from pi: means of -log rho and of
        rho - 1 - log rho), ``batch_norm``.
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
        accepted = keep  # bool ``[B, T]``
        if self.reject != "none":
            levels = {"sequence-sum": "sequence", "sequence-mean": "geometric"}
            ratio = _ratio(logs, keep, levels.get(self.reject, "token"))
            inside = (ratio >= self.reject_low) & (ratio <= self.reject_high)
            accepted = keep & ((inside | ~keep).all(-1, keepdim=True) if self.reject == "sequence-max" else inside)
        if staleness is not None and self.stale_only:
            weights, accepted = weights.masked_fill(keep & (staleness <= 0), 1.0), accepted | (keep & (staleness <= 0))
        if staleness is not None and self.max_token_staleness is not None:
            accepted = accepted & (staleness <= self.max_token_staleness)
        diagnostics = self._diagnostics(logs, raw, weights, keep, accepted)
        if self.batch_normalize:  # to a mean of 1 over accepted tokens or sequences; weights that are all 0 stay so
            parts = (weights, accepted) if self.level == "token" else (row_means(weights, accepted), accepted.any(-1))
            diagnostics["batch_norm"] = mean = masked_mean_std(*parts)[0].to(weights.dtype)
            weights = weights / mean.where(mean > 0, mean.new_ones(()))
        return weights, response_mask.masked_fill(~accepted, 0), diagnostics

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
