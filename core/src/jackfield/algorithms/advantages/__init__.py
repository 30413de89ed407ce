"""How much better than expected each token was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield.algorithms.advantages import responses, tokens
from jackfield.algorithms.registry import TOKEN_INPUTS, part
from jackfield.algorithms.tensors import Estimate, require_finite, require_shapes, row_sums, spread

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["advantages"]

_PARTS = (responses, tokens)  # imported for their registrations


def advantages(
    name: str, *, token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns over a whole batch.

    Args:
        name: of the estimator; ``jackfield algorithms list`` shows them all.
        token_rewards: float ``[B, T]``; a sequence-level reward stands on any one token of its row. Rewards on
            observation tokens count: for the row's total, and as credit of the model token before them.
        response_mask: bool or float ``[B, T]``, 1 on the model's own tokens.
        group_ids: int ``[B]``, equal for the rollouts of one task; needed by group-relative estimators.
        **options: of the estimator, and its further inputs: ``values`` float ``[B, T]`` of a critic, ``rollout_ids``
            int ``[B]`` (rows of one are its steps), ``step_ids`` int ``[B]`` (order of the steps in a run),
            ``anchor_ids`` int ``[B]`` (equal for steps taken in the same state), ``reward_dimensions`` float
            ``[B, D]``, ``baseline_rewards`` float ``[B]``, ``old_log_probs`` and ``sum_pi_squared`` float ``[B, T]``.

    Returns:
        ``(advantages, returns)``, float ``[B, T]``, 0 where the mask is 0. Estimators that compare whole responses
        return their advantages as returns, too.

    Raises:
        ConfigError: ``algorithm.unknown``, ``algorithm.input``, ``algorithm.not-finite`` (names the first row).
    """
    chosen = part("advantages", name)
    inputs, options = chosen.split(options)
    if not token_rewards.is_floating_point():
        token_rewards = token_rewards.float()
    used = {key: value for key, value in inputs.items() if value is not None and key in chosen.inputs}
    rows = {"reward": row_sums(token_rewards)}  # a sum of float32 does not overflow in float64
    rows |= {key: used[key] for key in ("reward_dimensions", "baseline_rewards") if key in used}
    require_finite(rows, None, "return a failure status from the reward agent in the place of such a score")
    on_tokens = {key: used[key] for key in used if key in TOKEN_INPUTS}
    require_shapes({"token_rewards": token_rewards, **on_tokens}, response_mask.shape)
    require_finite(on_tokens, response_mask)
    offered = {**inputs, "token_rewards": token_rewards, "response_mask": response_mask, "group_ids": group_ids}
    result: Estimate = chosen(offered, options)
    if isinstance(result, tuple):
        return result
    both = spread(result, response_mask, token_rewards) if result.dim() == 1 else result
    return both, both
