"""Advantage estimators: per token, per response relative to the rollouts of one task, and per step of a rollout.

Estimators per response use the total reward of each row. A group of one cannot be compared: its advantage is 0 (verl
and Trinity-RFT give it its raw score). Scores are compared in float64, so that equal rewards differ from their mean by
far less than any eps. For multi-step agents the rows of one rollout are its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from jackfield.algorithms.registry import TOKEN_INPUTS, Epsilon, Inputs, NotNegative, Positive, Share, part, register
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
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def advantages(
    name: str, *, token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Estimate ``(advantages, returns)`` over a whole batch, ``[B, T]``, 0 where the mask is 0.

    A sequence-level reward is on any one token of its row. Rewards on observation tokens count in the row's total, and
    are credited to the model token before them. ``group_ids`` (int ``[B]``) are equal for the rollouts of one task;
    group-relative estimators need them. ``options`` are options of the estimator and its other inputs: ``values`` of a
    critic, ``rollout_ids`` int ``[B]`` (rows of one rollout are its steps), ``step_ids`` int ``[B]`` (order of steps in
    a rollout), ``anchor_ids`` int ``[B]`` (equal for steps from the same state), ``reward_dimensions`` float
    ``[B, D]``, ``baseline_rewards`` float ``[B]``, ``old_log_probs`` and ``sum_pi_squared``. The returns of estimators
    that compare whole responses are the advantages.
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


@register("advantages", "gae", "sequence", "values", batch_options={"whiten": True})
def _gae(x: Inputs, *, gamma: Share = 1.0, lam: Share = 1.0, whiten: bool = False, eps: Epsilon = 1e-8) -> Estimate:
    """A_t = sum_l (gamma lam)^l delta_{t+l}, delta_t = r_t + gamma V_{t+1} - V_t; t counts model tokens only. [Schulman
    et al., arXiv:1506.02438, equation 16]

    Observation tokens are skipped: their values are not used and they neither discount nor decay. The value after the
    last model token is 0. returns = A + V. ``whiten`` (scope ``batch``) centres and scales A over all model tokens,
    after the returns are computed.

    Differs: Whitening is off by default. A reward on an observation token is credited to the model token before it
    (verl drops it).
    """
    tokens = ModelTokens(x.response_mask)
    dtype = x.token_rewards.dtype if x.token_rewards.dtype.itemsize >= 4 else x.values.float().dtype
    expected = tokens.pack(x.values.to(dtype))
    deltas = tokens.credit(x.token_rewards.to(dtype)).sub_(expected)
    deltas[:, :-1].add_(expected[:, 1:], alpha=gamma)  # after the last model token the value is 0
    advantages = tokens.unpack(discounted_sums(deltas, gamma * lam))
    returns = x.values.to(dtype).masked_fill(~tokens.keep, 0.0).add_(advantages)
    if whiten:
        advantages = _whitened(advantages, tokens.keep, eps)
    return advantages.to(x.token_rewards.dtype), returns.to(x.token_rewards.dtype)


def _whitened(values: Tensor, keep: Tensor, eps: float) -> Tensor:
    mean, deviation = masked_mean_std(values, keep)
    return ((values - mean.to(values.dtype)) / (deviation + eps).to(values.dtype)).masked_fill(~keep, 0.0)


@register("advantages", "reinforce", "sequence", "")
def _reinforce(x: Inputs, *, gamma: Share = 1.0) -> Estimate:
    """A_t = sum_{s >= t} gamma^{s - t} r_s: reward to go, no baseline. [Williams, 1992]"""
    return credited_returns(x.token_rewards, x.response_mask, gamma)


@register("advantages", "reinforce_plus_plus", "batch", "")
def _reinforce_plus_plus(x: Inputs, *, gamma: Share = 1.0, eps: Epsilon = 1e-8) -> Estimate:
    """A = (G - mean_batch(G)) / (std_batch(G) + eps), G_t the reward to go; statistics over all model tokens.
    [REINFORCE++, arXiv:2501.03262]

    The paper's KL penalty in the reward is :func:`jackfield.algorithms.shaping.kl_in_reward`.

    Differs: We use std + eps instead of sqrt(variance + eps), so that equal rewards give exactly 0.
    """
    returns = credited_returns(x.token_rewards, x.response_mask, gamma)
    return _whitened(returns, x.response_mask != 0, eps), returns


@register("advantages", "reinforce_plus_plus_baseline", "batch", "group_ids")
def _reinforce_plus_plus_baseline(x: Inputs, *, eps: Epsilon = 1e-8) -> Estimate:
    """A = (D - mean_batch(D)) / (std_batch(D) + eps), D_i = R_i - mean_group(R); statistics over all model tokens.
    [REINFORCE++, arXiv:2501.03262 (with baseline)]

    Differs: A group of one gets 0 and is excluded from the statistics; verl keeps its raw score.
    """
    centred = x.groups.relative(x.scores).unsqueeze(-1).expand(x.token_rewards.shape)
    keep = (x.response_mask != 0) & ~x.groups.alone.unsqueeze(-1)
    return _whitened(centred, keep, eps).to(x.token_rewards.dtype)


@register("advantages", "remax", "sequence", "baseline_rewards")
def _remax(x: Inputs) -> Estimate:
    """A_t = sum_{s >= t} r_s - R(greedy response): ``baseline_rewards`` float ``[B]``. [ReMax, arXiv:2310.10505]"""
    returns = credited_returns(x.token_rewards, x.response_mask)
    return returns - spread(x.baseline_rewards, x.response_mask, returns), returns


@register("advantages", "optimal_token_baseline", "group", "group_ids old_log_probs sum_pi_squared rollout_weights?")
def _optimal_token_baseline(x: Inputs, *, eps: Epsilon = 1e-8) -> Estimate:
    """A_it = G_it - B_t, B_t = sum_j(G_jt W_jt) / (sum_j(W_jt) + eps), W_it = sum_{s <= t}(1 - 2 pi_is + sum_v
    pi_is(v)^2). [optimal token baseline, as documented in verl (docs/algo/otb.md); the paper's own text was not at
    hand]

    G is the reward to go; t counts a row's model tokens; the sums are over the rows of the group that reach t. If only
    one row reaches t, its advantage is 0. ``rollout_weights`` scale each summand of W by their square.

    Differs: verl gives a group of one its raw return; the equation gives 0. As t counts model tokens, there is one
    estimator for single-turn and multi-turn responses.
    """
    tokens = ModelTokens(x.response_mask)
    dtype = x.token_rewards.dtype if x.token_rewards.dtype.itemsize >= 4 else x.token_rewards.float().dtype
    returns = credited_returns(x.token_rewards.to(dtype), x.response_mask)
    energy = 1.0 - 2.0 * x.old_log_probs.to(dtype).exp() + x.sum_pi_squared.to(dtype)
    if x.rollout_weights is not None:
        energy = energy * x.rollout_weights.to(dtype).square()
    there = tokens.pack(tokens.keep.to(dtype))
    weights = tokens.pack(energy.clamp(min=0.0)).cumsum(-1).mul_(there)
    packed, groups = tokens.pack(returns), x.groups
    baseline = groups.totals(packed * weights) / (groups.totals(weights) + eps)
    several = groups.totals(there) > 1
    advantages = (packed - baseline[groups.index]).masked_fill(~several[groups.index], 0.0)
    return tokens.unpack(advantages).to(x.token_rewards.dtype), returns.to(x.token_rewards.dtype)


@register("advantages", "grpo", "group", "group_ids old_log_probs?", batch_options={"std": "batch"})
def _grpo(
    x: Inputs,
    *,
    normalize_by_std: bool = True,
    std: Literal["group", "batch"] = "group",
    rank_penalty: Share = 0.0,
    eps: Epsilon = 1e-6,
) -> Estimate:
    """A_i = (R_i - mean_group(R)) / (std(R) + eps), the same for every token of row i; std over n - 1. [DeepSeekMath,
    arXiv:2402.03300, section 4.1.2; std of the batch: arXiv:2508.08221; rank penalty: arXiv:2506.02355]

    ``std="batch"`` takes the standard deviation of all rows. ``rank_penalty`` replaces R_i by
    R_i (1 - rank_penalty * rank_i / G), where rank_i is 0 for the group's least likely response; it needs
    ``old_log_probs``. The scope is ``group``, except with ``std="batch"``, which needs the whole batch.

    Differs: With a rank penalty, Trinity-RFT mixes raw rewards and penalised statistics; here mean, std and numerator
    all use the penalised rewards.
    """
    groups, scores = x.groups, x.scores
    if rank_penalty:
        if x.old_log_probs is None:
            raise ConfigError("grpo's rank_penalty needs old_log_probs", code="algorithm.input")
        likelihood = row_sums(x.old_log_probs.masked_fill(x.response_mask == 0, 0.0))
        ranks = Groups(groups.index, likelihood).means(groups.positions(likelihood).double())  # equal ones share a rank
        scores = scores * (1.0 - rank_penalty * ranks / groups.sizes)
    if normalize_by_std and std == "batch":
        return groups.relative(scores) / (masked_mean_std(scores, scores.isfinite())[1] + eps)
    return groups.relative(scores, eps if normalize_by_std else None)


@register("advantages", "dr_grpo", "group", "group_ids")
def _dr_grpo(x: Inputs) -> Estimate:
    """A_i = R_i - mean_group(R). [Dr. GRPO, arXiv:2503.20783]"""
    return x.groups.relative(x.scores)


@register("advantages", "grpo_passk", "group", "group_ids")
def _grpo_passk(x: Inputs, *, normalize_by_std: bool = True, eps: Epsilon = 1e-6) -> Estimate:
    """A_i = (max_group(R) - max_{j != i}(R_j)) / (std_group(R) + eps): only a single best response gets any. [Tang et
    al., arXiv:2503.19595 (leave-one-out baseline of the best of k)]

    Differs: verl refuses a group of one; here it gets 0. Several best responses get 0 each, because the maximum does
    not change without one of them.
    """
    groups, scores = x.groups, x.scores
    best = groups.maxima(scores)
    is_best = scores == best
    second = groups.maxima(scores.masked_fill(is_best, float("-inf")))
    unique = is_best & (groups.sums(is_best.double()) == 1) & ~groups.alone
    gap = (best - second).masked_fill(~unique, 0.0)
    return gap / (groups.stds(scores) + eps) if normalize_by_std else gap


@register("advantages", "rloo", "group", "group_ids")
def _rloo(x: Inputs) -> Estimate:
    """A_i = R_i - mean_{j != i}(R_j). [Ahmadian et al., arXiv:2402.14740; Kool et al., 2019]"""
    factor = x.groups.sizes / (x.groups.sizes - 1).clamp(min=1)  # from R_i - mean(R) to the mean of the others
    return x.groups.relative(x.scores) * factor


@register("advantages", "opo", "group", "group_ids")
def _opo(x: Inputs) -> Estimate:
    """A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), l the number of model tokens of a response. [OPO, arXiv:2505.23585]

    A group of empty responses has no tokens to give an advantage to.
    """
    groups, scores = x.groups, x.scores
    lengths = (x.response_mask != 0).sum(-1).double()
    baseline = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1.0)
    return (scores - baseline).masked_fill(groups.alone, 0.0)


@register("advantages", "gpg", "batch", "group_ids")
def _gpg(x: Inputs, *, f_norm: Positive = 1.0) -> Estimate:
    """A_i = alpha (R_i - mean_group(R)) / f_norm, alpha = B / (rows of groups whose rewards are not all equal). [GPG,
    arXiv:2504.02546, accurate gradient estimation]

    alpha compensates for the groups without a gradient; it is 1 if there are only such groups.

    Differs: verl counts rows with a score other than 0 instead of rows whose group is not uniform.
    """
    groups, scores = x.groups, x.scores
    mixed = groups.maxima(scores) + groups.maxima(-scores) > 0
    alpha = len(scores) / mixed.sum().clamp(min=1)
    return (alpha * groups.relative(scores) / f_norm).masked_fill(~mixed, 0.0)


@register("advantages", "gdpo", "batch", "group_ids reward_dimensions")
def _gdpo(
    x: Inputs, *, weights: tuple[float, ...] | None = None, normalize_over_batch: bool = True, eps: Epsilon = 1e-6
) -> Estimate:
    """A = (S - mean_batch(S)) / (std_batch(S) + eps), S_i = sum_d w_d (r_id - mean_group(r_d)) / (std_group(r_d) +
    eps). [GDPO, arXiv:2601.05242]

    ``reward_dimensions`` is float ``[B, D]``; only the shape and dtype of ``token_rewards`` are used.

    Differs: verl normalises over tokens, which weighs long responses; the paper's batch statistics are over responses.
    """
    groups, dimensions = x.groups, x.reward_dimensions.shape[1]
    if weights is not None and len(weights) != dimensions:
        message = f"gdpo needs a weight for each of {dimensions} reward dimensions"
        raise ConfigError(message, code="algorithm.input", found=len(weights))
    normalized = groups.relative(x.reward_dimensions.double(), eps)
    total = (normalized * normalized.new_tensor(weights or [1.0] * dimensions)).sum(-1)
    if normalize_over_batch:
        mean, deviation = masked_mean_std(total, ~groups.alone)
        total = ((total - mean) / (deviation + eps)).masked_fill(groups.alone, 0.0)
    return total


@register("advantages", "topr", "sequence", "")
def _topr(x: Inputs, *, baseline: float = 0.0) -> Estimate:
    """A_i = R_i - baseline; the loss ``topr`` tells positive from negative responses by its sign. [TOPR,
    arXiv:2503.14286]

    Differs: It is not relative to a group: it is the paper's reward minus one constant for the whole batch.
    """
    return x.scores - baseline


@register("advantages", "asymre", "group", "group_ids")
def _asymre(x: Inputs, *, baseline_shift: float = -0.1) -> Estimate:
    """A_i = R_i - (mean_group(R) + baseline_shift): below the mean, so that good responses weigh more. [Asymmetric
    REINFORCE, arXiv:2506.20520]
    """
    return (x.groups.relative(x.scores) - baseline_shift).masked_fill(x.groups.alone, 0.0)


@register("advantages", "opmd", "group", "group_ids")
def _opmd(x: Inputs, *, baseline: Literal["mean", "log_avg_exp"] = "mean", tau: Positive = 1.0) -> Estimate:
    """A_i = R_i - b, b = mean_group(R) (``mean``) or tau log(mean_group(exp(R / tau))) (``log_avg_exp``). [Trinity-RFT
    report, arXiv:2505.17826, appendix A.1 and A.3]

    The loss ``opmd`` needs ``mean``. ``log_avg_exp`` is tau log Z of appendix A.1, which ``opmd_kimi`` needs.
    """
    groups, scores = x.groups, x.scores
    if baseline == "mean":
        return groups.relative(scores)
    return (scores - tau * groups.log_mean_exp(scores / tau)).masked_fill(groups.alone, 0.0)


class _Rollouts:
    """Rows as steps of rollouts. Tasks may have equal rollout ids."""

    def __init__(self, x: Inputs) -> None:
        self.steps = Groups(x.group_ids, x.rollout_ids)  #: rows by rollout
        task_of_rollout = x.group_ids.new_zeros(len(self.steps.counts)).scatter(0, self.steps.index, x.group_ids)
        self.tasks = Groups(task_of_rollout)  #: rollouts by task
        self.position = self.steps.positions(x.step_ids)  #: int64 ``[B]``: each row's place in its rollout, from 0

    def compare(self, scores: Tensor, eps: float | None) -> Tensor:
        """Return for each row its rollout's score relative to those of its task, ``[B]``."""
        return self.tasks.relative(scores, eps)[self.steps.index]


@register("advantages", "step_wise_grpo", "group", "group_ids rollout_ids step_ids?")
def _step_wise_grpo(
    x: Inputs,
    *,
    rollout_reward: Literal["last", "sum"] = "last",
    normalize_by_std: bool = True,
    divide_by_steps: bool = False,
    eps: Epsilon = 1e-6,
) -> Estimate:
    """A_ik = (R_i - mean_task(R)) / (std_task(R) + eps) for every step k of run i, R_i the reward of its last step.
    [GRPO over runs, given to each step (rLLM; Trinity-RFT's step_wise_grpo); no paper of its own known to us]

    ``rollout_reward="sum"`` sums the rewards of all steps. ``divide_by_steps`` divides the advantage by their number.
    Without ``step_ids`` the steps of a run are in the order of the rows.

    Differs: We compare runs, not steps, so that long runs do not count more often. A task with one run gets 0.
    """
    rollouts, scores = _Rollouts(x), x.scores
    if rollout_reward == "last":
        scores = scores.masked_fill(rollouts.position + 1 != rollouts.steps.sizes, 0.0)
    rows = rollouts.compare(rollouts.steps.totals(scores), eps if normalize_by_std else None)
    return rows / rollouts.steps.sizes if divide_by_steps else rows


@register("advantages", "gigpo", "group", "group_ids rollout_ids step_ids? anchor_ids?")
def _gigpo(
    x: Inputs,
    *,
    gamma: Share = 0.95,
    step_weight: NotNegative = 1.0,
    normalize_by_std: bool = True,
    eps: Epsilon = 1e-6,
) -> Estimate:
    """A = A_run + step_weight A_step, both (x - mean) / (std + eps): of runs' total rewards in a task, and of steps'
    discounted returns in one anchor state of a task. [GiGPO, arXiv:2505.10978]

    ``anchor_ids`` are equal for steps that were taken in the same state (of one task). Without them, steps with equal
    ``step_ids`` are compared; without these, steps at the same place in their runs.

    Differs: The std is over n - 1 and a group of one gets 0, for runs and for anchor states.
    """
    rollouts, scores = _Rollouts(x), x.scores
    scale = eps if normalize_by_std else None
    anchors = x.anchor_ids if x.anchor_ids is not None else x.step_ids if x.step_ids is not None else rollouts.position
    table = scores.new_zeros((int(rollouts.steps.counts.max()), len(rollouts.steps.counts)))
    table[rollouts.position, rollouts.steps.index] = scores
    returns = discounted_sums(table.T, gamma).T[rollouts.position, rollouts.steps.index]
    of_step = Groups(x.group_ids, anchors).relative(returns, scale)
    return rollouts.compare(rollouts.steps.totals(scores), scale) + step_weight * of_step
