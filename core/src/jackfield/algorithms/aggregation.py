"""From a value per token to one number, by global counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.algorithms.registry import call, part, register
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["aggregate", "aggregate_rows"]


def aggregate(
    values: Tensor,
    mask: Tensor,
    mode: str,
    *,
    global_tokens: int,
    global_sequences: int,
    length_norm: float | None = None,
) -> Tensor:
    """The share of these rows in the batch's mean.

    Shares of micro-batches and ranks add up to the batch's value, because the counts are those of the whole batch.

    Args:
        values: float ``[B, T]``.
        mask: bool or float ``[B, T]``; positions of 0 do not count, whatever they hold (NaN included).
        mode: ``token-mean``, ``token-sum``, ``seq-mean-token-sum``, ``seq-mean-token-sum-norm`` or
            ``seq-mean-token-mean``.
        global_tokens: masked tokens in the whole batch.
        global_sequences: sequences in the whole batch.
        length_norm: the constant of ``seq-mean-token-sum-norm``, the same for the whole run (Dr. GRPO: the longest
            response that may be generated). None: the width T of ``values``, which is only right where every part of
            the batch is padded to one width.

    Returns:
        A scalar. A batch without tokens (or sequences) gives 0.

    Raises:
        ConfigError: ``algorithm.unknown`` or ``algorithm.input``.
    """
    kept = values.masked_fill(mask == 0, 0.0)
    offered = {
        "kept": kept,
        "mask": mask.to(values.dtype),
        "global_tokens": global_tokens,
        "global_sequences": global_sequences,
        "length_norm": _positive(length_norm if length_norm is not None else values.shape[-1] or 1),
    }
    share: Tensor = call(part("aggregation", mode), offered, {})
    return share


def aggregate_rows(values: Tensor, mode: str, *, global_sequences: float, length_norm: float | None = None) -> Tensor:
    """The share of losses that have one value per sequence, ``[B]``: there are no tokens to weigh.

    Every mean is the mean over sequences; ``token-sum`` is the sum; ``-norm`` divides by ``length_norm``, too.
    """
    part("aggregation", mode)
    total = values.sum()
    if mode == "token-sum":
        return total
    if mode == "seq-mean-token-sum-norm":
        total = total / _positive(length_norm if length_norm is not None else 1)
    return total / max(global_sequences, 1)


def _positive(length_norm: float) -> float:
    if not length_norm > 0:
        raise ConfigError("length_norm must be positive", code="algorithm.input", found=str(length_norm))
    return length_norm


@register("aggregation", "token-mean", "token", paper="DAPO, arXiv:2503.14476")
def _token_mean(kept: Tensor, global_tokens: int) -> Tensor:
    """sum of all tokens / tokens of the batch: every token counts the same."""
    return kept.sum() / max(global_tokens, 1)


@register("aggregation", "token-sum", "token")
def _token_sum(kept: Tensor) -> Tensor:
    """sum of all tokens."""
    return kept.sum()


@register("aggregation", "seq-mean-token-sum", "sequence", paper="Dr. GRPO, arXiv:2503.20783")
def _seq_mean_token_sum(kept: Tensor, global_sequences: int) -> Tensor:
    """sum of all tokens / sequences of the batch."""
    return kept.sum() / max(global_sequences, 1)


@register(
    "aggregation",
    "seq-mean-token-sum-norm",
    "sequence",
    paper="Dr. GRPO, arXiv:2503.20783",
    differs="verl divides by the padded width of each micro-batch and not by the number of sequences: its loss depends "
    "on how the batch is split. We divide by a constant (length_norm) and by the sequences of the batch.",
)
def _seq_mean_token_sum_norm(kept: Tensor, global_sequences: int, length_norm: float) -> Tensor:
    """sum of all tokens / (length_norm * sequences of the batch)."""
    return kept.sum() / (length_norm * max(global_sequences, 1))


@register("aggregation", "seq-mean-token-mean", "sequence", paper="GRPO, arXiv:2402.03300")
def _seq_mean_token_mean(kept: Tensor, mask: Tensor, global_sequences: int) -> Tensor:
    """mean over sequences of each sequence's mean; a sequence without model tokens gives 0 and still counts."""
    return (kept.sum(-1) / mask.sum(-1).clamp(min=1.0)).sum() / max(global_sequences, 1)
