"""Aggregation of values per token to one number, normalised by global counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jackfield.algorithms.registry import part, register
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

    Args:
        values: Float ``[B, T]``, or one per sequence, ``[B]``: then each sequence counts as one token.
        mask: Positions of 0 do not count, even if their value is NaN.
        aggregation: ``token-mean``, ``token-sum``, ``seq-mean-token-{sum,sum-norm,mean}``.
        global_tokens, global_sequences: Counts of the whole batch.
        length_norm: The constant of ``seq-mean-token-sum-norm``, above 0 and the same for the whole run (Dr. GRPO: the
            longest response that may be generated). None: the width T of ``values``, which is only correct if every
            part of the batch is padded to the same width.
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
