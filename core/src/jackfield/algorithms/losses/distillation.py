"""Divergences between student and teacher over the vocabulary.

The tokens are the student's own (on-policy distillation).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any

from attrs.validators import gt, lt

from jackfield.algorithms.aggregation import aggregate, means
from jackfield.algorithms.registry import part, register
from jackfield.algorithms.tensors import require_finite
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def distillation_loss(
    name: str,
    *,
    log_probs: Tensor,
    teacher_log_probs: Tensor,
    response_mask: Tensor,
    beta: float | None = None,
    **averaging: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's distillation loss, and its metrics.

    Args:
        name: ``forward_kl``, ``reverse_kl`` or ``jsd``.
        log_probs: the student's, normalised over the vocabulary, float ``[B, T, V]``, with gradients.
        teacher_log_probs: the teacher's, float ``[B, T, V]``; -inf is a probability of 0.
        response_mask: bool or float ``[B, T]``.
        beta: of ``jsd``; None: its default.
        **averaging: the counts, ``aggregation`` and ``length_norm`` of :func:`jackfield.algorithms.aggregate`.

    Raises:
        ConfigError: ``algorithm.unknown``, ``algorithm.input`` or ``algorithm.not-finite`` (names the first row).
    """
    chosen = part("distillation", name)
    _, options = chosen.split({} if beta is None else {"beta": beta})
    if log_probs.shape != teacher_log_probs.shape or log_probs.shape[:2] != response_mask.shape:
        raise ConfigError(
            "student, teacher and response_mask do not fit together",
            code="algorithm.input",
            expected="[B, T, V], [B, T, V] and [B, T]",
            found=f"{tuple(log_probs.shape)}, {tuple(teacher_log_probs.shape)} and {tuple(response_mask.shape)}",
        )
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

    Differs: beta=0 and beta=1 are refused: they are 0; forward_kl and reverse_kl are the limits of jsd over beta and
    1 - beta.
    """
    mixture = (teacher_log_probs + math.log(beta)).logaddexp(log_probs + math.log1p(-beta))
    return beta * _divergence(teacher_log_probs, mixture) + (1.0 - beta) * _divergence(log_probs, mixture)
