"""Estimators for agents of several steps: the rows of one run are its steps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from jackfield.algorithms.options import Epsilon, NotNegative, Share
from jackfield.algorithms.registry import register
from jackfield.algorithms.tensors import Groups, row_sums, spread
from jackfield.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = []

Pair = tuple["Tensor", "Tensor"]


class _Runs:
    """Rows as steps of runs. Run ids may repeat in another task."""

    def __init__(self, group_ids: Tensor, rollout_ids: Tensor, step_ids: Tensor | None) -> None:
        task = group_ids.unique(return_inverse=True)[1]
        run = rollout_ids.unique(return_inverse=True)[1]
        self.rows = Groups(task * (run.max() + 1) + run)  #: rows by run
        count = len(self.rows.counts)
        task_of_run = task.new_zeros(count).scatter(0, self.rows.index, task)
        self.tasks = Groups(task_of_run)  #: runs by task
        self.position = self._positions(step_ids)  #: int64 ``[B]``: each row's place in its run, from 0

    def _positions(self, step_ids: Tensor | None) -> Tensor:
        index = self.rows.index
        order = index.argsort(stable=True)
        if step_ids is not None:
            by_step = step_ids.argsort(stable=True)
            order = by_step[index[by_step].argsort(stable=True)]
        starts = (self.rows.counts.cumsum(0) - self.rows.counts).long()
        position = starts.new_zeros(len(index))
        position[order] = starts.new_ones(len(index)).cumsum(0) - 1 - starts[index[order]]
        return position

    def per_run(self, rows: Tensor) -> Tensor:
        """``[runs]``: the sum of each run's rows."""
        return self.rows.totals(rows)

    def last(self, rows: Tensor) -> Tensor:
        """``[runs]``: the value of each run's last step."""
        return self.per_run(rows.masked_fill(self.position + 1 != self.rows.sizes, 0.0))

    def to_go(self, rows: Tensor, gamma: float) -> Tensor:
        """``[B]``: for each step the discounted sum over it and the later steps of its run."""
        steps = int(self.rows.counts.max())
        table = rows.new_zeros((steps, len(self.rows.counts)))
        table[self.position, self.rows.index] = rows
        running = table.new_zeros(table.shape[1])
        for step in range(steps - 1, -1, -1):
            running = table[step] + gamma * running
            table[step] = running
        return table[self.position, self.rows.index]


def _relative(scores: Tensor, groups: Groups, normalize_by_std: bool, eps: float) -> Tensor:
    centred = scores - groups.means(scores)
    if normalize_by_std:
        centred = centred / (groups.stds(scores) + eps)
    return centred.masked_fill(groups.alone, 0.0)


@register(
    "advantages",
    "step_wise_grpo",
    "group",
    paper="GRPO over runs, given to each step (rLLM; Trinity-RFT's step_wise_grpo); no paper of its own known to us",
    differs="Runs, not steps, are compared: a long run does not count more often. A task with one run gets 0.",
)
def _step_wise_grpo(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor | None = None,
    *,
    rollout_reward: Literal["last", "sum"] = "last",
    normalize_by_std: bool = True,
    divide_by_steps: bool = False,
    eps: Epsilon = 1e-6,
) -> Pair:
    """A_ik = (R_i - mean_task(R)) / (std_task(R) + eps) for every step k of run i, R_i the reward of its last step.

    ``rollout_reward="sum"`` adds up the rewards of all steps. ``divide_by_steps`` shares the advantage among the steps.
    Without ``step_ids`` the steps of a run are in the order of the rows.
    """
    if rollout_reward not in ("last", "sum"):
        raise ConfigError(
            "step_wise_grpo has no such rollout_reward",
            code="algorithm.input",
            expected="last or sum",
            found=rollout_reward,
        )
    runs = _Runs(group_ids, rollout_ids, step_ids)
    scores = row_sums(token_rewards)
    of_run = runs.last(scores) if rollout_reward == "last" else runs.per_run(scores)
    rows = _relative(of_run, runs.tasks, normalize_by_std, eps)[runs.rows.index]
    if divide_by_steps:
        rows = rows / runs.rows.sizes
    advantages = spread(rows, response_mask, token_rewards)
    return advantages, advantages


@register(
    "advantages",
    "gigpo",
    "group",
    paper="GiGPO, arXiv:2505.10978",
    differs="std over n - 1 and a group of one gets 0, for runs and for anchor states alike.",
)
def _gigpo(
    token_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor,
    rollout_ids: Tensor,
    step_ids: Tensor | None = None,
    anchor_ids: Tensor | None = None,
    *,
    gamma: Share = 0.95,
    step_weight: NotNegative = 1.0,
    normalize_by_std: bool = True,
    eps: Epsilon = 1e-6,
) -> Pair:
    """A = A_run + step_weight A_step, both (x - mean) / (std + eps): of runs' total rewards in a task, and of steps'
    discounted returns in one anchor state of a task.

    ``anchor_ids`` are equal for steps that were taken in the same state (of one task). Without them, steps of the same
    ``step_ids`` are compared; without these, too, steps of the same place in their runs.
    """
    runs = _Runs(group_ids, rollout_ids, step_ids)
    scores = row_sums(token_rewards)
    of_run = _relative(runs.per_run(scores), runs.tasks, normalize_by_std, eps)[runs.rows.index]
    anchors = anchor_ids if anchor_ids is not None else step_ids if step_ids is not None else runs.position
    task = group_ids.unique(return_inverse=True)[1]
    state = anchors.unique(return_inverse=True)[1]
    of_step = _relative(runs.to_go(scores, gamma), Groups(task * (state.max() + 1) + state), normalize_by_std, eps)
    advantages = spread(of_run + step_weight * of_step, response_mask, token_rewards)
    return advantages, advantages
