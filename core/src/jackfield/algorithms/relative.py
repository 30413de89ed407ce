"""Estimators of one advantage per response, relative to the rollouts of one task or to a constant.

They use the total reward of each row. A group of one cannot be compared: its advantage is 0. Scores are compared in
float64, so that equal rewards differ from their mean by far less than any eps. For multi-step agents the rows of one
rollout are its steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import Epsilon, NotNegative, Positive, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Estimate, Groups, masked_mean_std, row_sums
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


@register("advantages", "grpo", "group", batch_options={"std": "batch"})
def _grpo(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    old_log_probs: Tensor | None = None,
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

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    With a rank penalty, Trinity-RFT mixes raw rewards and penalised statistics; here mean, std and numerator all use
    the penalised rewards.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    if rank_penalty:
        if old_log_probs is None:
            raise ConfigError("grpo's rank_penalty needs old_log_probs", code="algorithm.input")
        likelihood = row_sums(old_log_probs.masked_fill(response_mask == 0, 0.0))
        scores = scores * (1.0 - rank_penalty * _ranks(likelihood, groups) / groups.sizes)
    if normalize_by_std and std == "batch":
        return groups.relative(scores) / (masked_mean_std(scores, scores.isfinite())[1] + eps)
    return groups.relative(scores, eps if normalize_by_std else None)


def _ranks(keys: Tensor, groups: Groups) -> Tensor:
    """Return each row's rank in its group by ascending key, from 0; equal keys share their mean rank."""
    return Groups(groups.index, keys).means(groups.positions(keys).double())


@register("advantages", "dr_grpo", "group")
def _dr_grpo(token_rewards: Tensor, group_ids: Tensor) -> Estimate:
    """A_i = R_i - mean_group(R). [Dr. GRPO, arXiv:2503.20783]

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    """
    return Groups(group_ids).relative(row_sums(token_rewards))


@register("advantages", "grpo_passk", "group")
def _grpo_passk(
    token_rewards: Tensor, group_ids: Tensor, *, normalize_by_std: bool = True, eps: Epsilon = 1e-6
) -> Estimate:
    """A_i = (max_group(R) - max_{j != i}(R_j)) / (std_group(R) + eps): only a single best response gets any. [Tang et
    al., arXiv:2503.19595 (leave-one-out baseline of the best of k)]

    Differs: verl refuses a group of one; here it gets 0. Several best responses get 0 each, because the maximum does
    not change without one of them.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    best = groups.maxima(scores)
    is_best = scores == best
    second = groups.maxima(scores.masked_fill(is_best, float("-inf")))
    unique = is_best & (groups.sums(is_best.double()) == 1) & ~groups.alone
    gap = (best - second).masked_fill(~unique, 0.0)
    return gap / (groups.stds(scores) + eps) if normalize_by_std else gap


@register("advantages", "rloo", "group")
def _rloo(token_rewards: Tensor, group_ids: Tensor) -> Estimate:
    """A_i = R_i - mean_{j != i}(R_j). [Ahmadian et al., arXiv:2402.14740; Kool et al., 2019]

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    """
    groups = Groups(group_ids)
    factor = groups.sizes / (groups.sizes - 1).clamp(min=1)  # from R_i - mean(R) to the mean of the others
    return groups.relative(row_sums(token_rewards)) * factor


@register("advantages", "opo", "group")
def _opo(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Estimate:
    """A_i = R_i - sum_j(l_j R_j) / sum_j(l_j), l the number of model tokens of a response. [OPO, arXiv:2505.23585]

    A group of empty responses has no tokens to give an advantage to.

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    lengths = (response_mask != 0).sum(-1).double()
    baseline = groups.sums(lengths * scores) / groups.sums(lengths).clamp(min=1.0)
    return (scores - baseline).masked_fill(groups.alone, 0.0)


@register("advantages", "gpg", "batch")
def _gpg(token_rewards: Tensor, group_ids: Tensor, *, f_norm: Positive = 1.0) -> Estimate:
    """A_i = alpha (R_i - mean_group(R)) / f_norm, alpha = B / (rows of groups whose rewards are not all equal). [GPG,
    arXiv:2504.02546, accurate gradient estimation]

    alpha compensates for the groups without a gradient; it is 1 if there are only such groups.

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    verl counts rows with a score other than 0 instead of rows whose group is not uniform.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    mixed = groups.maxima(scores) + groups.maxima(-scores) > 0
    alpha = len(scores) / mixed.sum().clamp(min=1)
    return (alpha * groups.relative(scores) / f_norm).masked_fill(~mixed, 0.0)


@register("advantages", "gdpo", "batch")
def _gdpo(
    token_rewards: Tensor,
    group_ids: Tensor,
    reward_dimensions: Tensor,
    *,
    weights: tuple[float, ...] | None = None,
    normalize_over_batch: bool = True,
    eps: Epsilon = 1e-6,
) -> Estimate:
    """A = (S - mean_batch(S)) / (std_batch(S) + eps), S_i = sum_d w_d (r_id - mean_group(r_d)) / (std_group(r_d) +
    eps). [GDPO, arXiv:2601.05242]

    ``reward_dimensions`` is float ``[B, D]``; only the shape and dtype of ``token_rewards`` are used.

    Differs: verl and Trinity-RFT give a group of one its raw score; here it gets 0, having nothing to compare with.
    verl normalises over tokens, which weighs long responses; the paper's batch statistics are over responses.
    """
    groups, dimensions = Groups(group_ids), reward_dimensions.shape[1]
    if weights is not None and len(weights) != dimensions:
        message = f"gdpo needs a weight for each of {dimensions} reward dimensions"
        raise ConfigError(message, code="algorithm.input", found=len(weights))
    normalized = groups.relative(reward_dimensions.double(), eps)
    total = (normalized * normalized.new_tensor(weights or [1.0] * dimensions)).sum(-1)
    if normalize_over_batch:
        mean, deviation = masked_mean_std(total, ~groups.alone)
        total = ((total - mean) / (deviation + eps)).masked_fill(groups.alone, 0.0)
    return total


@register("advantages", "topr", "sequence")
def _topr(token_rewards: Tensor, *, baseline: float = 0.0) -> Estimate:
    """A_i = R_i - baseline; the loss ``topr`` tells positive from negative responses by its sign. [TOPR,
    arXiv:2503.14286]

    Differs: It is not relative to a group: it is the paper's reward minus one constant for the whole batch.
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
    token_rewards: Tensor, group_ids: Tensor, *, baseline: Literal["mean", "log_avg_exp"] = "mean", tau: Positive = 1.0
) -> Estimate:
    """A_i = R_i - b, b = mean_group(R) (``mean``) or tau log(mean_group(exp(R / tau))) (``log_avg_exp``). [Trinity-RFT
    report, arXiv:2505.17826, appendix A.1 and A.3]

    The loss ``opmd`` needs ``mean``. ``log_avg_exp`` is tau log Z of appendix A.1, which ``opmd_kimi`` needs.

    Differs: Trinity-RFT gives a group of one its raw score; both baselines of one reward are that reward, so 0.
    """
    groups, scores = Groups(group_ids), row_sums(token_rewards)
    if baseline == "mean":
        return groups.relative(scores)
    return (scores - tau * groups.log_mean_exp(scores / tau)).masked_fill(groups.alone, 0.0)


class _Rollouts:
    """Rows as steps of rollouts. Tasks may have equal rollout ids."""

    def __init__(self, group_ids: Tensor, rollout_ids: Tensor, step_ids: Tensor | None) -> None:
        self.steps = Groups(group_ids, rollout_ids)  #: rows by rollout
        task_of_rollout = group_ids.new_zeros(len(self.steps.counts)).scatter(0, self.steps.index, group_ids)
        self.tasks = Groups(task_of_rollout)  #: rollouts by task
        self.position = self.steps.positions(step_ids)  #: int64 ``[B]``: each row's place in its rollout, from 0

    def compare(self, scores: Tensor, eps: float | None) -> Tensor:
        """Return for each row its rollout's score relative to those of its task, ``[B]``."""
        return self.tasks.relative(scores, eps)[self.steps.index]

    def to_go(self, rows: Tensor, gamma: float) -> Tensor:
        """Return for each step the discounted sum over it and the later steps of its rollout, ``[B]``."""
        table = rows.new_zeros((int(self.steps.counts.max()), len(self.steps.counts)))
        table[self.position, self.steps.index] = rows
        running = table.new_zeros(table.shape[1])
        for step in range(len(table) - 1, -1, -1):
            running = table[step] + gamma * running
            table[step] = running
        return table[self.position, self.steps.index]


@register("advantages", "step_wise_grpo", "group")
def _step_wise_grpo(
    token_rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor | None = None,
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
    rollouts, scores = _Rollouts(group_ids, rollout_ids, step_ids), row_sums(token_rewards)
    if rollout_reward == "last":
        scores = scores.masked_fill(rollouts.position + 1 != rollouts.steps.sizes, 0.0)
    rows = rollouts.compare(rollouts.steps.totals(scores), eps if normalize_by_std else None)
    return rows / rollouts.steps.sizes if divide_by_steps else rows


@register("advantages", "gigpo", "group")
def _gigpo(
    token_rewards: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor | None = None,
    anchor_ids: Tensor | None = None,
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
    rollouts, scores = _Rollouts(group_ids, rollout_ids, step_ids), row_sums(token_rewards)
    scale = eps if normalize_by_std else None
    anchors = anchor_ids if anchor_ids is not None else step_ids if step_ids is not None else rollouts.position
    of_step = Groups(group_ids, anchors).relative(rollouts.to_go(scores, gamma), scale)
    return rollouts.compare(rollouts.steps.totals(scores), scale) + step_weight * of_step
