"""Text environments for agents: a pool with deadlines, adapters to other libraries, and a household game."""

from __future__ import annotations

from jackfield_environments.loading import load
from jackfield_environments.pool import EnvironmentPool, Episode, PoolCounts
from jackfield_environments.settings import BUILT_IN, Environment, EnvironmentConfig, Observation, Step

__all__ = [
    "BUILT_IN",
    "Environment",
    "EnvironmentConfig",
    "EnvironmentPool",
    "Episode",
    "Observation",
    "PoolCounts",
    "Step",
    "load",
]
