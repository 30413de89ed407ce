"""Baselines that are neither a critic nor a plain group mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import Epsilon, Positive
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Estimate, Groups, ModelTokens, credited_returns, row_sums

if TYPE_CHECKING:
    from torch import Tensor


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

    G is the reward to go; t counts a row's model tokens; the sums are over the rows of the group that reach t. Where
    one row alone reaches t, its advantage is 0. ``rollout_weights`` scale each summand of W by their square.

    Differs: verl gives a group of one its raw return; the equation gives 0. One estimator for single and multi-turn
    responses: t counts model tokens.
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


@register("advantages", "topr", "sequence")
def _topr(token_rewards: Tensor, *, baseline: float = 0.0) -> Estimate:
    """A_i = R_i - baseline; the loss ``topr`` tells positive from negative responses by its sign. [TOPR,
    arXiv:2503.14286]

    Differs: Not relative to a group: the paper's reward, less one constant for the whole batch.
    """
    return row_sums(token_rewards) - baseline


@register("advantages", "asymre", "group")
def _asymre(token_rewards: Tensor, group_ids: Tensor, *, baseline_shift: float = -0.1) -> Estimate:
    """A_i = R_i - (mean_group(R) + baseline_shift): below the mean, so that good responses weigh more. [Asymmetric
    REINFORCE, arXiv:2506.20520]

    Differs: Trinity-RFT gives a group of one its raw score; here it gets 0.
    """
    groups = Groups(group_ids)
    return (groups.relative(row_sums(token_rewards)) - baseline_shift).masked_fill(groups.alone, 0.0)


@register("advantages", "opmd", "group")
def _opmd(
    token_rewards: Tensor,
    group_ids: Tensor,
    *,
    baseline: Literal["mean", "log_avg_exp"] = "mean",
    tau: Positive = 1.0,
) -> Estimate:
    """A_i = R_i - b, b = mean_group(R) (``mean``) or tau log(mean_group(exp(R / tau))) (``log_avg_exp``). [Trinity-RFT
    report, arXiv:2505.17826, appendix A.1 and A.3]

    The loss ``opmd`` wants ``mean``. ``log_avg_exp`` is tau log Z of appendix A.1: what ``opmd_kimi`` wants.

    Differs: Trinity-RFT gives a group of one its raw score; both baselines of one reward are that reward, so 0.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    if baseline == "mean":
        return groups.relative(scores)
    return (scores - tau * groups.log_mean_exp(scores / tau)).masked_fill(groups.alone, 0.0)
