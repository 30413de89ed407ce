"""Estimators for agents of several steps: the rows of one rollout are its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import Epsilon, NotNegative, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Estimate, Groups, row_sums

if TYPE_CHECKING:
    from torch import Tensor


class _Rollouts:
    """Rows as steps of rollouts. Rollout ids may repeat in another task."""

    def __init__(self, group_ids: Tensor, rollout_ids: Tensor, step_ids: Tensor | None) -> None:
        self.steps = Groups(group_ids, rollout_ids)  #: rows by rollout
        task_of_rollout = group_ids.new_zeros(len(self.steps.counts)).scatter(0, self.steps.index, group_ids)
        self.tasks = Groups(task_of_rollout)  #: rollouts by task
        self.position = self.steps.positions(step_ids)  #: int64 ``[B]``: each row's place in its rollout, from 0

    def compare(self, scores: Tensor, eps: float | None) -> Tensor:
        """``[B]``: for each row its rollout's score, relative to those of its task."""
        return self.tasks.relative(scores, eps)[self.steps.index]

    def to_go(self, rows: Tensor, gamma: float) -> Tensor:
        """``[B]``: for each step the discounted sum over it and the later steps of its rollout."""
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

    ``rollout_reward="sum"`` adds up the rewards of all steps. ``divide_by_steps`` shares the advantage among the steps.
    Without ``step_ids`` the steps of a run are in the order of the rows.

    Differs: Runs, not steps, are compared: a long run does not count more often. A task with one run gets 0.
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

    ``anchor_ids`` are equal for steps that were taken in the same state (of one task). Without them, steps of the same
    ``step_ids`` are compared; without these, too, steps of the same place in their runs.

    Differs: std over n - 1 and a group of one gets 0, for runs and for anchor states alike.
    """
    rollouts, scores = _Rollouts(group_ids, rollout_ids, step_ids), row_sums(token_rewards)
    scale = eps if normalize_by_std else None
    anchors = anchor_ids if anchor_ids is not None else step_ids if step_ids is not None else rollouts.position
    of_step = Groups(group_ids, anchors).relative(rollouts.to_go(scores, gamma), scale)
    return rollouts.compare(rollouts.steps.totals(scores), scale) + step_weight * of_step
