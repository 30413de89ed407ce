"""Off-policy correction: the policy that is trained is not quite the one that generated.

Numerics of inference and training differ, weights are stale, data is replayed. pi_rollout is the behaviour policy. Two
modes: *decoupled* weighs by pi_old / pi_rollout and clips around pi_old; *bypass* takes pi_rollout for pi_old, so that
the loss's own ratio corrects, and rejection alone is left to do here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import attrs
from attrs.validators import ge, gt

from jackfield.algorithms.options import NotNegative, Positive, above
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import masked_mean_std, require_finite, require_shapes, row_means
from jackfield.errors import ConfigError
from jackfield.settings import option

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Correction", "importance_weights"]

_LEVELS = ("token", "sequence", "geometric")
_BOUNDS = ("truncate", "icepop", "none")
_REJECTS = ("none", "token", "sequence-sum", "sequence-mean", "sequence-max")
_CLAMP = 20.0  # of a log-ratio, so that a weight is finite


@attrs.frozen(kw_only=True)
class Correction:
    """Off-policy correction: importance weights of the policy that generated, and what they reject."""

    enabled: bool | None = option(
        None,
        help="null: where the rollout server's log-probs differ from the engine's by more than rounding, and with "
        "sampling filters (top_p, top_k, min_p)",
    )
    level: Literal["token", "sequence", "geometric"] = option(
        "token", help="a ratio per token, of the whole response, or of the response's geometric mean"
    )
    bound: Literal["truncate", "icepop", "none"] = option(
        "truncate", help="truncate: at most upper; icepop: 0 outside of [lower, upper]"
    )
    upper: float = option(2.0, help="largest weight", validator=gt(0.0))
    lower: float = option(0.5, help="smallest weight, for icepop", validator=ge(0.0))
    reject: Literal["none", "token", "sequence-sum", "sequence-mean", "sequence-max"] = option(
        "none", help="leave out tokens, or whole responses, whose ratio is outside of [reject_low, reject_high]"
    )
    reject_low: float = option(0.5, help="lower bound of a ratio that is kept", validator=ge(0.0))
    reject_high: float = option(2.0, help="upper bound of a ratio that is kept", validator=above("reject_low"))
    batch_normalize: bool = option(False, help="divide by the batch's mean weight")

    @property
    def options(self) -> dict[str, Any]:
        """Of :func:`importance_weights`."""
        return attrs.asdict(self, filter=lambda field, _: field.name != "enabled")


@register(
    "correction",
    "importance_weights",
    "token",
    paper="TIS: Yao et al., fengyao.notion.site/off-policy-rl, 2025; "
    "MIS: Liu, Li et al., richardli.xyz/rl-collapse, 2025; "
    "IcePop: Ring-1T, arXiv:2510.18855",
    differs="IcePop's published bounds are 0.5 and 5; the default upper bound here is 2 for all forms. "
    "Weights carry no gradient.",
    batch_options={"batch_normalize": True},
)
def importance_weights(
    log_probs: Tensor,
    rollout_log_probs: Tensor,
    response_mask: Tensor,
    *,
    level: str = "token",
    bound: str = "truncate",
    upper: Positive = 2.0,
    lower: NotNegative = 0.5,
    reject: str = "none",
    reject_low: NotNegative = 0.5,
    reject_high: Annotated[float, above("reject_low")] = 2.0,
    batch_normalize: bool = False,
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """w_t = rho_t = pi_t / pi_rollout_t, or of the sequence prod(rho), bounded; and a mask without what is rejected.

    Args:
        log_probs: of the policy that is corrected for, float ``[B, T]``: pi_old (decoupled PPO) or pi (policy
        gradient).
        rollout_log_probs: of the policy that generated, float ``[B, T]``.
        response_mask: bool or float ``[B, T]``.
        level: ``token``; ``sequence``: prod(rho) on each token; ``geometric``: prod(rho)^(1 / length) on each token.
        bound: ``truncate``: min(w, upper) (TIS); ``icepop``: 0 outside of [lower, upper]; ``none``.
        upper: of the weight.
        lower: of the weight, for ``icepop``.
        reject: what is masked (MIS): ``token``: tokens of rho outside of [reject_low, reject_high]; ``sequence-sum``,
            ``sequence-mean``, ``sequence-max``: whole sequences whose prod(rho), prod(rho)^(1 / length), or any rho is.
        reject_low: lower bound of a ratio that is kept.
        reject_high: upper bound of a ratio that is kept.
        batch_normalize: divide by the mean weight of the tokens that are kept, or of the sequences that have any
            (levels ``sequence`` and ``geometric``). Scope ``batch``: call it once over the whole batch.

    Returns:
        ``(weights, mask, diagnostics)``: float ``[B, T]`` without gradient, 0 where the response mask is 0; the
        response
        mask (its dtype) with 0 for what is rejected, to leave out of the loss while counts stay as they are; scalars:
        ``mean``, ``std``, ``min``, ``max`` of the bounded weights, ``effective_sample_size`` ((sum w)^2 / (n sum w^2)),
        ``fraction_high`` and ``fraction_low`` (ratios beyond the bounds), ``fraction_rejected`` (tokens), ``kl`` and
        ``kl_k3`` (of pi_rollout from pi: means of -log rho and of rho - 1 - log rho), ``batch_norm``.

    Raises:
        ConfigError: ``algorithm.input`` or ``algorithm.not-finite`` (names the first row).
    """
    _check(level, bound, reject, upper, lower, reject_low, reject_high)
    tensors = {"log_probs": log_probs, "rollout_log_probs": rollout_log_probs}
    require_shapes(tensors, response_mask)
    require_finite(tensors, response_mask)
    keep = response_mask != 0
    logs = (log_probs.detach() - rollout_log_probs.detach()).masked_fill(~keep, 0.0)
    raw = _log_weights(logs, keep, level).clamp(-_CLAMP, _CLAMP).exp()
    weights = raw
    if bound == "truncate":
        weights = raw.clamp(max=upper)
    elif bound == "icepop":
        weights = raw.masked_fill((raw < lower) | (raw > upper), 0.0)
    weights = weights.masked_fill(~keep, 0.0)
    accepted = _accepted(logs, keep, reject, reject_low, reject_high)
    diagnostics = _diagnostics(logs, raw, weights, keep, accepted, upper, lower)
    if batch_normalize:
        weights, diagnostics["batch_norm"] = _normalised(weights, accepted, level)
    return weights, response_mask.masked_fill(~accepted, 0), diagnostics


def _check(
    level: str, bound: str, reject: str, upper: float, lower: float, reject_low: float, reject_high: float
) -> None:
    for value, known in ((level, _LEVELS), (bound, _BOUNDS), (reject, _REJECTS)):
        if value not in known:
            raise ConfigError(
                "importance_weights has no such setting", code="algorithm.input", expected=", ".join(known), found=value
            )
    for low, high, name in ((lower, upper, "lower, upper"), (reject_low, reject_high, "reject_low, reject_high")):
        if not 0.0 <= low < high:
            raise ConfigError(
                "bounds of a ratio are not in order", code="algorithm.input", where=name, found=f"{low}, {high}"
            )


def _log_weights(logs: Tensor, keep: Tensor, level: str) -> Tensor:
    if level == "token":
        return logs
    rows = logs.sum(-1) if level == "sequence" else row_means(logs, keep)
    return rows.unsqueeze(-1).expand(logs.shape)


def _accepted(logs: Tensor, keep: Tensor, reject: str, low: float, high: float) -> Tensor:
    """bool ``[B, T]``: model tokens that stay."""
    if reject == "none":
        return keep
    statistic = (
        {
            "token": lambda: logs,
            "sequence-sum": lambda: logs.sum(-1, keepdim=True),
            "sequence-mean": lambda: row_means(logs, keep).unsqueeze(-1),
            "sequence-max": lambda: logs,
        }[reject]()
        .clamp(-_CLAMP, _CLAMP)
        .exp()
    )
    inside = (statistic >= low) & (statistic <= high)
    if reject == "sequence-max":
        inside = (inside | ~keep).all(-1, keepdim=True)
    return keep & inside


def _normalised(weights: Tensor, accepted: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """Weights of mean 1 over accepted tokens or sequences; weights that are all 0 stay so."""
    if level == "token":
        mean = masked_mean_std(weights, accepted)[0]
    else:
        mean = masked_mean_std(row_means(weights, accepted), accepted.any(-1))[0]
    mean = mean.to(weights.dtype)
    return weights / mean.where(mean > 0, mean.new_ones(())), mean


def _diagnostics(
    logs: Tensor, raw: Tensor, weights: Tensor, keep: Tensor, accepted: Tensor, upper: float, lower: float
) -> dict[str, Tensor]:
    """All over the model tokens; 0 for a batch without any."""
    count = keep.sum().clamp(min=1)
    mean, deviation = masked_mean_std(weights, keep)
    wide = weights.double()
    bounded = logs.clamp(-_CLAMP, _CLAMP)
    some = keep.any()
    lowest = weights.masked_fill(~keep, float("inf")).amin() if weights.numel() else mean
    highest = weights.masked_fill(~keep, float("-inf")).amax() if weights.numel() else mean
    return {
        "mean": mean,
        "std": deviation,
        "min": lowest.double().where(some, mean),
        "max": highest.double().where(some, mean),
        "effective_sample_size": wide.sum().square() / (count * wide.square().sum()).clamp(min=1e-30),
        "fraction_high": ((raw > upper) & keep).sum() / count,
        "fraction_low": ((raw < lower) & keep).sum() / count,
        "fraction_rejected": (keep & ~accepted).sum() / count,
        "kl": masked_mean_std(-logs, keep)[0],
        "kl_k3": masked_mean_std(bounded.expm1() - bounded, keep)[0],
    }
