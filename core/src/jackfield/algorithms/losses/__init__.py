"""What the optimizer minimises, per token or per sequence, then aggregated by global counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.algorithms.aggregation import aggregate, aggregate_rows
from jackfield.algorithms.correction import importance_weights
from jackfield.algorithms.losses import (
    clipped,
    covariance,
    distillation,
    mirror_descent,
    off_policy,
    sequence,
    supervised,
)
from jackfield.algorithms.losses.distillation import distillation_loss
from jackfield.algorithms.losses.terms import Term
from jackfield.algorithms.losses.values import value_loss
from jackfield.algorithms.registry import Part, call, check_options, part, signature
from jackfield.algorithms.tensors import require_finite, require_shapes
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["COUNTS", "ROW_INPUTS", "TOKEN_INPUTS", "distillation_loss", "policy_loss", "prepare", "value_loss"]

_PARTS = (clipped, covariance, distillation, mirror_descent, off_policy, sequence, supervised)  # for registration

#: What a loss may use beside ``log_probs`` and ``response_mask``: per token ``[B, T]`` …
TOKEN_INPUTS = (
    "old_log_probs",
    "advantages",
    "ref_log_probs",
    "rollout_log_probs",
    "m2po_mask",
    "clip_cov_mask",
    "kl_cov_mask",
)
#: … per row ``[B]`` …
ROW_INPUTS = (
    "expert_mask",
    "group_ids",
    "pair_ids",
    "rewards",
    "dpo_margins",
    "dpo_signs",
    "opmd_log_partition",
    "opmd_group_means",
    "opmd_group_sizes",
)
#: … and counts over the whole batch.
COUNTS = ("global_usual_tokens", "global_expert_tokens", "global_usual_sequences", "global_expert_sequences")


def policy_loss(
    name: str,
    *,
    log_probs: Tensor,
    response_mask: Tensor,
    global_tokens: int,
    global_sequences: int,
    old_log_probs: Tensor | None = None,
    advantages: Tensor | None = None,
    aggregation: str = "token-mean",
    ref_log_probs: Tensor | None = None,
    rollout_log_probs: Tensor | None = None,
    expert_mask: Tensor | None = None,
    length_norm: float | None = None,
    rollout_weights: Tensor | None = None,
    correction: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The share of these rows in the batch's policy loss.

    Args:
        name: of the loss; ``jackfield algorithms list`` shows them all.
        log_probs: of the policy, float ``[B, T]``, with gradients.
        response_mask: bool or float ``[B, T]``. What any tensor holds where it is 0 changes nothing, NaN included.
        global_tokens: masked tokens in the whole batch (all micro-batches, all ranks).
        global_sequences: sequences in the whole batch.
        old_log_probs: of the policy before this batch's updates, float ``[B, T]``.
        advantages: float ``[B, T]``.
        aggregation: see :func:`jackfield.algorithms.aggregate`. A loss with one value per sequence (or pair) is a mean
            over sequences (or pairs) in every mode but ``token-sum``.
        ref_log_probs: of the reference, float ``[B, T]``.
        rollout_log_probs: of the policy that generated, float ``[B, T]``.
        expert_mask: bool ``[B]``, the rows that an expert wrote.
        length_norm: see :func:`jackfield.algorithms.aggregate`.
        rollout_weights: importance weights over the whole batch, float ``[B, T]``, 0 for what is left out.
        correction: options of :func:`jackfield.algorithms.importance_weights`, by which the weights are computed here
            from ``old_log_probs`` and ``rollout_log_probs``. None: no correction.
        **options: of the loss, and its further inputs: ``group_ids``, ``pair_ids`` int ``[B]``, ``rewards`` float
            ``[B]``, counts (``global_usual_tokens``, …) and what :func:`prepare` has precomputed.

    Returns:
        ``(loss, metrics)``: scalars; metrics are means over the batch and add up like the loss.

    Raises:
        ConfigError: ``algorithm.unknown``, ``algorithm.input`` or ``algorithm.not-finite`` (names the first row).
    """
    chosen = part("loss", name)
    inputs = {
        "old_log_probs": old_log_probs,
        "advantages": advantages,
        "ref_log_probs": ref_log_probs,
        "rollout_log_probs": rollout_log_probs,
        "expert_mask": expert_mask,
    }
    options = dict(options)
    inputs |= {key: options.pop(key) for key in (*TOKEN_INPUTS, *ROW_INPUTS, *COUNTS) if key in options}
    check_options(chosen, options)
    if correction is not None:
        if rollout_weights is not None:
            raise ConfigError("give rollout_weights or correction, not both", code="algorithm.input")
        rollout_weights = _weights(old_log_probs, rollout_log_probs, response_mask, correction)
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    offered = _clean(chosen, {"log_probs": log_probs, **inputs}, response_mask) | counts
    result, row_metrics = call(chosen, offered, options)
    del offered  # copies of the inputs; what the gradient needs of them is kept by what was computed
    terms: tuple[Term, ...] = result if isinstance(result, tuple) else (Term(values=result),)
    shares = [
        term.weight * _share(term, response_mask, aggregation, counts, length_norm, rollout_weights) for term in terms
    ]
    loss = sum(shares[1:], start=shares[0])
    metrics = {key: _mean(value.detach().to(loss.dtype), response_mask, counts) for key, value in row_metrics.items()}
    return loss, metrics


def prepare(name: str, *, log_probs: Tensor, response_mask: Tensor, **inputs: Any) -> dict[str, Tensor]:
    """What the loss ``name`` has to know of the whole batch, as columns of its rows.

    A loss that compares rows or tokens of the whole batch (:attr:`Part.whole_batch`) cannot be split into
    micro-batches as it is. Its rows can, once each carries these columns: pass them to :func:`policy_loss`.

    Args:
        name: of the loss. One that can be split needs nothing: the answer is empty.
        log_probs: of the policy as it is right before the optimizer step, over the whole batch, ``[B, T]``.
        response_mask: ``[B, T]``.
        **inputs: the same inputs and options as for :func:`policy_loss`.

    Returns:
        Column name to tensor ``[B, T]`` or ``[B]``, without gradients.
    """
    chosen = part("loss", name)
    check_options(chosen, inputs, (*TOKEN_INPUTS, *ROW_INPUTS, *COUNTS))
    if chosen.prepare is None:
        return {}
    preparation = attrs.evolve(chosen, kind="prepare", function=chosen.prepare)
    tensors = {"log_probs": log_probs.detach()} | {
        key: inputs.pop(key) for key in (*TOKEN_INPUTS, *ROW_INPUTS, *COUNTS) if key in inputs
    }
    columns: dict[str, Tensor] = call(
        preparation, _clean(preparation, tensors, response_mask) | {**chosen.options, **inputs}, {}
    )
    return columns


def _clean(chosen: Part, inputs: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """The inputs that the part takes: shapes and values checked, and 0 where the mask is 0."""
    known = signature(chosen.function)
    used = {key: value for key, value in inputs.items() if value is not None and (known.open or key in known.inputs)}
    tokens = {key: value for key, value in used.items() if key == "log_probs" or key in TOKEN_INPUTS}
    require_shapes(tokens, mask)
    require_finite(tokens, mask)
    cleaned = {key: value.masked_fill(mask == 0, 0) for key, value in tokens.items()}
    rows = {key: value for key, value in used.items() if key in ROW_INPUTS}
    for key, value in rows.items():
        if value.shape != mask.shape[:1]:
            raise ConfigError(
                f"{key} has one value per row",
                code="algorithm.input",
                where=key,
                expected=str(tuple(mask.shape[:1])),
                found=str(tuple(value.shape)),
            )
    return {**used, **cleaned, "response_mask": mask}


def _weights(
    old_log_probs: Tensor | None, rollout_log_probs: Tensor | None, mask: Tensor, correction: Mapping[str, Any]
) -> Tensor:
    if old_log_probs is None or rollout_log_probs is None:
        raise ConfigError("a correction needs old_log_probs and rollout_log_probs", code="algorithm.input")
    if correction.get("batch_normalize"):
        raise ConfigError(
            "batch-normalised weights depend on the whole batch",
            code="algorithm.input",
            fix="compute importance_weights once over the whole batch and pass them as rollout_weights",
        )
    weights, kept, _ = importance_weights(old_log_probs, rollout_log_probs, mask, **correction)
    return weights.masked_fill(kept == 0, 0.0)


def _share(
    term: Term,
    response_mask: Tensor,
    mode: str,
    counts: Mapping[str, int],
    length_norm: float | None,
    rollout_weights: Tensor | None,
) -> Tensor:
    sequences = counts["global_sequences"] if term.sequences is None else term.sequences
    if term.values.dim() == 1:
        if rollout_weights is not None:
            raise ConfigError(
                "a loss with one value per sequence takes no importance weights per token",
                code="algorithm.input",
                fix="leave the correction out, or choose a loss with a value per token",
            )
        return aggregate_rows(term.values, mode, global_sequences=sequences, length_norm=length_norm)
    token_values = term.values
    if rollout_weights is not None:
        token_values = token_values * rollout_weights.detach().masked_fill(response_mask == 0, 0.0)
    return aggregate(
        token_values,
        response_mask if term.mask is None else term.mask,
        mode,
        global_tokens=counts["global_tokens"] if term.tokens is None else term.tokens,
        global_sequences=int(sequences),
        length_norm=length_norm,
    )


def _mean(value: Tensor, mask: Tensor, counts: Mapping[str, int]) -> Tensor:
    if value.dim() == 1:
        return value.sum() / max(counts["global_sequences"], 1)
    return aggregate(value, mask, "token-mean", **counts)
