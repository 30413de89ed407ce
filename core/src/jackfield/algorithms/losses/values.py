"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jackfield.algorithms.aggregation import aggregate, means
from jackfield.algorithms.tensors import clean
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def value_loss(
    *,
    values: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    global_tokens: int,
    global_sequences: int,
    old_values: Tensor | None = None,
    clip: float | None = 0.2,
    aggregation: str = "token-mean",
    length_norm: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a critic and its metrics.

    It is max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2; without a clip (V - R)^2 / 2. PPO's value
    loss as in OpenAI baselines (the paper has no clip). Everything is float ``[B, T]``.

    Args:
        values: of the critic, with gradients.
        returns: what they should be (:func:`jackfield.algorithms.advantages`).
        response_mask: bool or float.
        global_tokens: masked tokens in the whole batch.
        global_sequences: sequences in the whole batch.
        old_values: of the critic before this batch's updates; needed by ``clip``.
        clip: how far from ``old_values`` a prediction may get better; None: off.
        aggregation: see :func:`jackfield.algorithms.aggregate`.
        length_norm: see there.

    Returns:
        ``(loss, metrics)``: the share of these rows.

    Raises:
        ConfigError: ``algorithm.input`` or ``algorithm.not-finite`` (names the first row).
    """
    if clip is not None and old_values is None:
        raise ConfigError("a clipped value loss needs old_values", code="algorithm.input", fix="clip=None: no clipping")
    tensors = clean({"values": values, "returns": returns, "old_values": old_values}, response_mask)
    predicted, target = tensors["values"], tensors["returns"]
    errors = clipped = (predicted - target).square()
    if clip is not None:
        old = tensors["old_values"]
        clipped = (predicted.maximum(old - clip).minimum(old + clip) - target).square()
    counts = {"global_tokens": global_tokens, "global_sequences": global_sequences}
    losses = 0.5 * errors.maximum(clipped)
    loss = aggregate(losses, response_mask, aggregation, length_norm=length_norm, **counts)
    metrics = {"value/clip_fraction": clipped > errors, "value/mean": predicted, "value/squared_error": errors}
    return loss, means(metrics, response_mask, loss, **counts)
