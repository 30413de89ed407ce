"""The judge of mathematics with what it needs imported, so that forked worker processes share it."""

from __future__ import annotations

from jackfield_reward_rules.judge import Judge

__all__ = ["Judge"]

Judge(method="math").judge(r"\boxed{\frac{1}{2} + \sqrt{x}}", "$0.5$")  # imports the rest
