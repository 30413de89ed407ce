"""Losses per token or per sequence, aggregated by global counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.algorithms.aggregation import aggregate, means
from jackfield.algorithms.correction import Correction
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
from jackfield.algorithms.options import check_options
from jackfield.algorithms.registry import TOKEN_INPUTS, Part, call, part
from jackfield.algorithms.tensors import clean
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["distillation_loss", "policy_loss", "prepare", "value_loss"]

_PARTS = (clipped, covariance, distillation, mirror_descent, off_policy, sequence, supervised)  # for registration


def policy_loss(
    name: str,
    *,
    log_probs: Tensor,
    response_mask: Tensor,
    global_tokens: int,
    global_sequences: int,
    aggregation: str = "token-mean",
    length_norm: float | None = None,
    rollout_weights: Tensor | None = None,
    correction: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the share of these rows in the batch's policy loss.

    Args:
        name: of the loss; ``jackfield algorithms list`` shows them all.
        log_probs: of the policy, float ``[B, T]``, with gradients.
        response_mask: bool or float ``[B, T]``. What any tensor holds where it is 0 changes nothing, NaN included.
        global_tokens: masked tokens in the whole batch (all micro-batches, all ranks).
        global_sequences: sequences in the whole batch.
        aggregation: see :func:`jackfield.algorithms.aggregate`. A loss with one value per sequence (or pair) is a mean
            over sequences (or pairs) in every mode but ``token-sum``.
        length_norm: see :func:`jackfield.algorithms.aggregate`.
        rollout_weights: importance weights over the whole batch, float ``[B, T]``, 0 for what is left out.
        correction: options of :class:`jackfield.algorithms.Correction`, by which the weights are computed here from
            ``old_log_probs`` and ``rollout_log_probs``. None: no correction.
        **options: of the loss, and its further inputs: ``old_log_probs`` (of the policy before this batch's updates),
            ``advantages``, ``ref_log_probs`` (of the reference) and ``rollout_log_probs`` (of the policy that
            generated), float ``[B, T]``; ``expert_mask`` bool ``[B]`` (the rows that an expert wrote), ``group_ids``,
            ``pair_ids`` int ``[B]``, ``rewards`` float ``[B]``; counts (``global_usual_tokens``, …); and what
            :func:`prepare` has precomputed. Without that, this call is the whole batch.

    Returns:
        ``(loss, metrics)``: scalars; metrics are means over the batch and add up like the loss.

    Raises:
        ConfigError: ``algorithm.unknown``, ``algorithm.input`` or ``algorithm.not-finite`` (names the first row).
    """
    chosen = part("loss", name)
    inputs, options = check_options(chosen, options)
    if correction is not None:
        if rollout_weights is not None:
            raise ConfigError("give rollout_weights or correction, not both", code="algorithm.input")
        rollout_weights = _weights(inputs, response_mask, correction)
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    offered = _clean(chosen, {**inputs, **counts, "log_probs": log_probs}, response_mask)
    offered |= _prepared(chosen, offered, options)
    result, metrics = call(chosen, offered, options)
    del offered  # copies of the inputs; what the gradient needs of them is kept by what was computed
    terms: tuple[Term, ...] = result if isinstance(result, tuple) else (Term(values=result),)
    shares = [
        term.weight
        * aggregate(
            _weighed(term.values, rollout_weights, response_mask),
            response_mask if term.mask is None else term.mask,
            aggregation,
            length_norm=length_norm,
            **{**counts, **term.counts},
        )
        for term in terms
    ]
    loss = sum(shares[1:], start=shares[0])
    return loss, means(metrics, response_mask, loss, **counts)


def prepare(name: str, *, log_probs: Tensor, response_mask: Tensor, **options: Any) -> dict[str, Tensor]:
    """Compute what the loss ``name`` has to know of the whole batch, as columns of its rows.

    A loss that compares rows or tokens of the whole batch (:attr:`Part.whole_batch`) cannot be split into
    micro-batches as it is. Its rows can, once each carries these columns: pass them to :func:`policy_loss`.

    Args:
        name: of the loss. One that can be split needs nothing: the answer is empty.
        log_probs: of the policy as it is right before the optimizer step, over the whole batch, ``[B, T]``.
        response_mask: ``[B, T]``.
        **options: the same inputs and options as for :func:`policy_loss`.

    Returns:
        Column name to tensor ``[B, T]`` or ``[B]``, without gradients.
    """
    chosen = part("loss", name)
    inputs, options = check_options(chosen, options)
    if chosen.prepare is None:
        return {}
    offered = _clean(chosen, {**inputs, "log_probs": log_probs}, response_mask)
    return _columns(chosen, offered, options)


def _prepared(chosen: Part, offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The columns of a call that is the whole batch: none where they are given, or cannot be made."""
    needed = {name for name, required in chosen.prepare_inputs.items() if required}
    makes = chosen.prepare is not None and not offered.keys() >= set(chosen.whole_batch)
    return _columns(chosen, offered, options) if makes and offered.keys() >= needed else {}


def _columns(chosen: Part, offered: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Tensor]:
    assert chosen.prepare is not None
    preparation = attrs.evolve(chosen, kind="preparation", function=chosen.prepare, prepare=None, whole_batch=())
    given = {**chosen.options, **options, **offered, "log_probs": offered["log_probs"].detach()}
    columns: dict[str, Tensor] = call(preparation, given, {})
    return columns


def _clean(chosen: Part, inputs: Mapping[str, Any], mask: Tensor) -> dict[str, Any]:
    """The inputs that the part (or its preparation) takes: shapes and values checked, and 0 where the mask is 0."""
    known = chosen.signature
    wanted = {*known.inputs, *chosen.prepare_inputs}
    used = {key: value for key, value in inputs.items() if value is not None and (known.open or key in wanted)}
    rows = {key: value for key, value in used.items() if hasattr(value, "dim") and key not in TOKEN_INPUTS}
    for key, value in rows.items():
        if value.shape not in (mask.shape[:1], mask.shape):
            raise ConfigError(
                f"{key} has one value per row",
                code="algorithm.input",
                where=key,
                expected=tuple(mask.shape[:1]),
                found=tuple(value.shape),
            )
    return {**used, **clean({key: used[key] for key in used if key in TOKEN_INPUTS}, mask), "response_mask": mask}


def _weights(inputs: Mapping[str, Any], mask: Tensor, correction: Mapping[str, Any]) -> Tensor:
    old, rollout = inputs.get("old_log_probs"), inputs.get("rollout_log_probs")
    if old is None or rollout is None:
        raise ConfigError("a correction needs old_log_probs and rollout_log_probs", code="algorithm.input")
    _, options = check_options(part("correction", "importance_weights"), correction)
    if options.get("batch_normalize"):
        raise ConfigError(
            "batch-normalised weights depend on the whole batch",
            code="algorithm.input",
            fix="compute Correction.weights once over the whole batch and pass them as rollout_weights",
        )
    weights, kept, _ = Correction(**options).weights(old, rollout, mask)
    return weights.masked_fill(kept == 0, 0.0)


def _weighed(values: Tensor, weights: Tensor | None, mask: Tensor) -> Tensor:
    if weights is None:
        return values
    if values.dim() == 1:
        raise ConfigError(
            "a loss with one value per sequence takes no importance weights per token",
            code="algorithm.input",
            fix="leave the correction out, or choose a loss with a value per token",
        )
    return values * weights.detach().masked_fill(mask == 0, 0.0)
