"""The judge of mathematics with what it needs imported, so that forked worker processes share it."""

from __future__ import annotations

import math_verify  # noqa: F401

from jackfield_reward_rules.judge import Judge

__all__ = ["Judge"]
