"""An advantage estimator of one's own, and a run with it."""

from __future__ import annotations

import sys

from jackfield.algorithms import register
from jackfield.compose import run
from jackfield.config import load_config


@register("advantages", "leave_one_out", "group")
def leave_one_out(token_rewards, response_mask, group_ids, values=None):
    """A_i = R_i - mean of the other rewards of its group, the same for every token. [Kool et al., 2019;
    arXiv:2402.14740]
    """
    rewards = token_rewards.sum(-1)
    same = (group_ids[:, None] == group_ids[None, :]).to(rewards.dtype)
    others = (same.sum(-1) - 1).clamp(min=1)
    baseline = (same @ rewards - rewards) / others
    advantages = (rewards - baseline)[:, None] * response_mask.to(rewards.dtype)
    return advantages, advantages


if __name__ == "__main__":
    run(load_config(sys.argv[1], ["algorithm.advantages={name: leave_one_out}", *sys.argv[2:]]))
