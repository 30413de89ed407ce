"""Advantage estimators per token, with a critic or with the reward to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jackfield.algorithms import relative  # noqa: F401 (it registers estimators)
from jackfield.algorithms.options import Epsilon, Share
from jackfield.algorithms.registry import TOKEN_INPUTS, part, register
from jackfield.algorithms.tensors import (
    Estimate,
    Groups,
    ModelTokens,
    credited_returns,
    discounted_sums,
    masked_mean_std,
    require_finite,
    require_shapes,
    row_sums,
    spread,
)

if TYPE_CHECKING:
    from torch import Tensor


def advantages(
    name: str, *, token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Estimate advantages and returns over a whole batch.

    Args:
        name: The name of the estimator.
        token_rewards: Float ``[B, T]``; a sequence-level reward is on any one token of its row. Rewards on
            observation tokens count in the row's total, and are credited to the model token before them.
        response_mask: Bool or float ``[B, T]``, 1 on the model's own tokens.
        group_ids: Int ``[B]``, equal for the rollouts of one task; group-relative estimators need it.
        **options: Options of the estimator and its other inputs: ``values`` float ``[B, T]`` of a critic,
            ``rollout_ids`` int ``[B]`` (rows of one rollout are its steps), ``step_ids`` int ``[B]`` (order of steps in
            a rollout), ``anchor_ids`` int ``[B]`` (equal for steps from the same state), ``reward_dimensions`` float
            ``[B, D]``, ``baseline_rewards`` float ``[B]``, ``old_log_probs`` and ``sum_pi_squared`` float ``[B, T]``.

    Returns:
        ``(advantages, returns)``, float ``[B, T]``, 0 where the mask is 0. For estimators that compare whole responses,
        the returns are the advantages. Errors are ``algorithm.unknown``, ``algorithm.input`` and
        ``algorithm.not-finite`` (which names the first row).
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


@register("advantages", "gae", "sequence", batch_options={"whiten": True})
def _gae(
    token_rewards: Tensor,
    response_mask: Tensor,
    values: Tensor,
    *,
    gamma: Share = 1.0,
    lam: Share = 1.0,
    whiten: bool = False,
    eps: Epsilon = 1e-8,
) -> Estimate:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; t counts model tokens only. [Schulman
    et al., arXiv:1506.02438, equation 16]

    Observation tokens are skipped: their values are not used and they neither discount nor decay. The value after the
    last model token is 0. returns = A + V. ``whiten`` (scope ``batch``) centres and scales A over all model tokens,
    after the returns are computed.

    Differs: Whitening is off by default. A reward on an observation token is credited to the model token before it
    (verl drops it).
    """
    tokens = ModelTokens(response_mask)
    dtype = token_rewards.dtype if token_rewards.dtype.itemsize >= 4 else values.float().dtype
    expected = tokens.pack(values.to(dtype))
    deltas = tokens.credit(token_rewards.to(dtype)).sub_(expected)
    deltas[:, :-1].add_(expected[:, 1:], alpha=gamma)  # after the last model token the value is 0
    advantages = tokens.unpack(discounted_sums(deltas, gamma * lam))
    returns = values.to(dtype).masked_fill(~tokens.keep, 0.0).add_(advantages)
    if whiten:
        advantages = _whitened(advantages, tokens.keep, eps)
    return advantages.to(token_rewards.dtype), returns.to(token_rewards.dtype)


def _whitened(values: Tensor, keep: Tensor, eps: float) -> Tensor:
    mean, deviation = masked_mean_std(values, keep)
    return ((values - mean.to(values.dtype)) / (deviation + eps).to(values.dtype)).masked_fill(~keep, 0.0)


@register("advantages", "reinforce", "sequence")
def _reinforce(token_rewards: Tensor, response_mask: Tensor, *, gamma: Share = 1.0) -> Estimate:
    """A_t = sum_{s >= t} gamma^{s - t} r_s: reward to go, no baseline. [Williams, 1992]"""
    return credited_returns(token_rewards, response_mask, gamma)


@register("advantages", "reinforce_plus_plus", "batch")
def _reinforce_plus_plus(
    token_rewards: Tensor, response_mask: Tensor, *, gamma: Share = 1.0, eps: Epsilon = 1e-8
) -> Estimate:
    """A = (G - mean_batch(G)) / (std_batch(G) + eps), G_t the reward to go; statistics over all model tokens.
    [REINFORCE++, arXiv:2501.03262]

    The paper's KL penalty in the reward is :func:`jackfield.algorithms.kl_in_reward`.

    Differs: We use std + eps instead of sqrt(variance + eps), so that equal rewards give exactly 0.
    """
    returns = credited_returns(token_rewards, response_mask, gamma)
    return _whitened(returns, response_mask != 0, eps), returns


@register("advantages", "reinforce_plus_plus_baseline", "batch")
def _reinforce_plus_plus_baseline(
    token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor, *, eps: Epsilon = 1e-8
) -> Estimate:
    """A = (D - mean_batch(D)) / (std_batch(D) + eps), D_i = R_i - mean_group(R); statistics over all model tokens.
    [REINFORCE++, arXiv:2501.03262 (with baseline)]

    Differs: A group of one gets 0 and is excluded from the statistics; verl keeps its raw score.
    """
    groups = Groups(group_ids)
    centred = groups.relative(row_sums(token_rewards)).unsqueeze(-1).expand(token_rewards.shape)
    keep = (response_mask != 0) & ~groups.alone.unsqueeze(-1)
    return _whitened(centred, keep, eps).to(token_rewards.dtype)


@register("advantages", "remax", "sequence")
def _remax(token_rewards: Tensor, response_mask: Tensor, baseline_rewards: Tensor) -> Estimate:
    """A_t = sum_{s >= t} r_s - R(greedy response): ``baseline_rewards`` float ``[B]``. [ReMax, arXiv:2310.10505]"""
    returns = credited_returns(token_rewards, response_mask)
    return returns - spread(baseline_rewards, response_mask, returns), returns


@register("advantages", "optimal_token_baseline", "group")
def _optimal_token_baseline(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor,
    sum_pi_squared: Tensor,
    rollout_weights: Tensor | None = None,
    *,
    eps: Epsilon = 1e-8,
) -> Estimate:
    """A_it = G_it - B_t, B_t = sum_j(G_jt W_jt) / (sum_j(W_jt) + eps), W_it = sum_{s <= t}(1 - 2 pi_is + sum_v
    pi_is(v)^2). [optimal token baseline, as documented in verl (docs/algo/otb.md); the paper's own text was not at
    hand]

    G is the reward to go; t counts a row's model tokens; the sums are over the rows of the group that reach t. If only
    one row reaches t, its advantage is 0. ``rollout_weights`` scale each summand of W by their square.

    Differs: verl gives a group of one its raw return; the equation gives 0. As t counts model tokens, there is one
    estimator for single-turn and multi-turn responses.
    """
    tokens = ModelTokens(response_mask)
    dtype = token_rewards.dtype if token_rewards.dtype.itemsize >= 4 else token_rewards.float().dtype
    returns = credited_returns(token_rewards.to(dtype), response_mask)
    energy = 1.0 - 2.0 * old_log_probs.to(dtype).exp() + sum_pi_squared.to(dtype)
    if rollout_weights is not None:
        energy = energy * rollout_weights.to(dtype).square()
    there = tokens.pack(tokens.keep.to(dtype))
    weights = tokens.pack(energy.clamp(min=0.0)).cumsum(-1).mul_(there)
    packed = tokens.pack(returns)
    groups = Groups(group_ids)
    baseline = groups.totals(packed * weights) / (groups.totals(weights) + eps)
    several = groups.totals(there) > 1
    advantages = (packed - baseline[groups.index]).masked_fill(~several[groups.index], 0.0)
    return tokens.unpack(advantages).to(token_rewards.dtype), returns.to(token_rewards.dtype)
