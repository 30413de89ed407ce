"""Values per token: their aggregation to one number, and divergences from a reference or a teacher.

Aggregates are normalised by global counts. J. Schulman, "Approximating KL divergence", 2020: with r = pi_ref / pi and
samples from pi, E[k1] = E[k3] = KL(pi, pi_ref). In distillation the tokens are the student's own (on-policy
distillation).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from attrs.validators import gt, lt

from jackfield.algorithms.registry import part, register
from jackfield.algorithms.tensors import CLAMP, log_ratio, require_finite
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def aggregate(
    values: Tensor,
    mask: Tensor,
    aggregation: str = "token-mean",
    *,
    global_tokens: float,
    global_sequences: float,
    length_norm: float | None = None,
) -> Tensor:
    """Return the share of these rows in the batch's mean.

    The sum of the shares of micro-batches and ranks is the batch's value, 0 for a batch without tokens (or sequences).
    ``values`` are ``[B, T]``, or one per sequence, ``[B]``: then each sequence counts as one token. Positions where the
    mask is 0 do not count, even if their value is NaN. ``aggregation`` is ``token-mean``, ``token-sum`` or
    ``seq-mean-token-{sum,sum-norm,mean}``. ``length_norm`` is the constant of ``seq-mean-token-sum-norm``, above 0 and
    the same for the whole run (Dr. GRPO: the longest response that may be generated). None: the width T of ``values``,
    which is only correct if every part of the batch is padded to the same width.
    """
    if values.dim() == 1:
        values, mask, global_tokens = (values.unsqueeze(-1), mask.new_ones((len(values), 1)), global_sequences)
    length_norm = length_norm if length_norm is not None else values.shape[-1] or 1
    if not length_norm > 0:
        raise ConfigError("length_norm must be positive", code="algorithm.input", found=length_norm)
    offered = {"kept": values.masked_fill(mask == 0, 0.0), "mask": mask.to(values.dtype), "length_norm": length_norm}
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    share: Tensor = part("aggregation", aggregation)({**offered, **counts})
    return share


def means(metrics: Mapping[str, Tensor], mask: Tensor, like: Tensor, **averaging: Any) -> dict[str, Tensor]:
    """Return the shares in the batch's token means of metrics, in ``like``'s dtype, for any loss aggregation."""
    how = {**averaging, "aggregation": "token-mean"}
    return {name: aggregate(value.detach().to(like.dtype), mask, **how) for name, value in metrics.items()}


@register("aggregation", "token-mean", "token")
def _token_mean(kept: Tensor, global_tokens: float) -> Tensor:
    """sum of all tokens / tokens of the batch: every token counts the same. [DAPO, arXiv:2503.14476]"""
    return kept.sum() / max(global_tokens, 1)


@register("aggregation", "token-sum", "token")
def _token_sum(kept: Tensor) -> Tensor:
    """sum of all tokens."""
    return kept.sum()


@register("aggregation", "seq-mean-token-sum", "sequence")
def _seq_mean_token_sum(kept: Tensor, global_sequences: float) -> Tensor:
    """sum of all tokens / sequences of the batch. [Dr. GRPO, arXiv:2503.20783]"""
    return kept.sum() / max(global_sequences, 1)


@register("aggregation", "seq-mean-token-sum-norm", "sequence")
def _seq_mean_token_sum_norm(kept: Tensor, global_sequences: float, length_norm: float) -> Tensor:
    """sum of all tokens / (length_norm * sequences of the batch). [Dr. GRPO, arXiv:2503.20783]

    Differs: verl divides by the padded width of each micro-batch and not by the number of sequences: its loss depends
    on how the batch is split. We divide by a constant (length_norm) and by the sequences of the batch.
    """
    return kept.sum() / (length_norm * max(global_sequences, 1))


@register("aggregation", "seq-mean-token-mean", "sequence")
def _seq_mean_token_mean(kept: Tensor, mask: Tensor, global_sequences: float) -> Tensor:
    """mean over sequences of each sequence's mean; a sequence without model tokens gives 0 and still counts. [GRPO,
    arXiv:2402.03300]
    """
    return (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / max(global_sequences, 1)


def kl(name: str, log_probs: Tensor, ref_log_probs: Tensor, *, old_log_probs: Tensor | None = None) -> Tensor:
    """Estimate the KL per token of the policy's log-probs from the reference's.

    ``name`` is ``k1``, ``k2``, ``k3``, ``abs``, ``low_var_kl``, the value of one of them with the gradient of k2
    (``k1+``, ``k3+``, ``abs+``, ``low_var_kl+``), or ``k3_corrected``, which needs the ``old_log_probs`` of the policy
    that generated.
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


def distillation_loss(
    name: str,
    *,
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    response_mask: Tensor,
    aggregation: str = "token-mean",
    length_norm: float | None = None,
    **options: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's distillation loss, and its metrics.

    ``name`` is ``forward_kl``, ``reverse_kl`` or ``jsd`` (with the option ``beta``). The log-probs are normalised over
    the vocabulary, float ``[B, T, V]``, the student's with gradients; a teacher's -inf is a probability of 0. Counts,
    ``aggregation`` and ``length_norm`` are those of :func:`jackfield.algorithms.per_token.aggregate`.
    """
    chosen = part("distillation", name)
    counts, options = chosen.split(options)
    averaging: dict[str, Any] = {"aggregation": aggregation, "length_norm": length_norm, **counts}
    if log_probs.shape != teacher_log_probs.shape or log_probs.shape[:2] != response_mask.shape:
        found = f"{tuple(log_probs.shape)}, {tuple(teacher_log_probs.shape)} and {tuple(response_mask.shape)}"
        message, expected = "student, teacher and response_mask do not fit", "[B, T, V], [B, T, V] and [B, T]"
        raise ConfigError(message, code="algorithm.input", expected=expected, found=found)
    outside, even = (response_mask == 0).unsqueeze(-1), -math.log(log_probs.shape[-1])
    tensors = {"log_probs": log_probs, "teacher_log_probs": teacher_log_probs}
    divergence: Tensor = chosen({key: value.masked_fill(outside, even) for key, value in tensors.items()}, options)
    fix = "student and teacher need the same vocabulary; reverse_kl needs a teacher that excludes no token"
    require_finite({f"the {name}": divergence}, response_mask, fix)
    loss = aggregate(divergence, response_mask, **averaging)
    return loss, means({f"distillation/{name}": divergence}, response_mask, loss, **averaging)


def _divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) over the last dimension; 0 log 0 = 0."""
    nothing = log_p == float("-inf")
    terms = log_p.exp() * (log_p.masked_fill(nothing, 0.0) - log_q.masked_fill(nothing, 0.0))
    return terms.sum(-1)


@register("distillation", "forward_kl", "token")
def _forward_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(teacher, student) = sum_v p_T log(p_T / p_S): covers the teacher's modes. [GKD, arXiv:2306.13649,
    section 2]
    """
    return _divergence(teacher_log_probs, log_probs)


@register("distillation", "reverse_kl", "token")
def _reverse_kl(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """KL(student, teacher) = sum_v p_S log(p_S / p_T): stays within the teacher's modes. [GKD, arXiv:2306.13649,
    section 2; MiniLLM, arXiv:2306.08543]
    """
    return _divergence(log_probs, teacher_log_probs)


@register("distillation", "jsd", "token")
def _jsd(log_probs: Tensor, teacher_log_probs: Tensor, *, beta: Annotated[float, gt(0.0), lt(1.0)] = 0.5) -> Tensor:
    """beta KL(teacher, m) + (1 - beta) KL(student, m), m = beta p_T + (1 - beta) p_S. [GKD, arXiv:2306.13649, section
    2, equation 1]

    Differs: We refuse beta=0 and beta=1, where the divergence is 0; forward_kl and reverse_kl are the limits of jsd
    divided by beta and 1 - beta.
    """
    mixture = (teacher_log_probs + math.log(beta)).logaddexp(log_probs + math.log1p(-beta))
    return beta * _divergence(teacher_log_probs, mixture) + (1.0 - beta) * _divergence(log_probs, mixture)
