"""The one place where names in a configuration become objects."""

from __future__ import annotations

from jackfield.compose.run import (
    Explored,
    Rewarded,
    RunResult,
    explore,
    explore_async,
    reward,
    reward_async,
    run,
    run_async,
)
from jackfield.runtime.control import list_replicas, scale_replicas

__all__ = [
    "Explored",
    "Rewarded",
    "RunResult",
    "explore",
    "explore_async",
    "list_replicas",
    "reward",
    "reward_async",
    "run",
    "run_async",
    "scale_replicas",
]
