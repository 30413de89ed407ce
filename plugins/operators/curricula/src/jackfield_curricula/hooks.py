"""The registration of the curricula."""

from __future__ import annotations

from collections.abc import Callable

from jackfield.plugins.hooks import hookimpl
from jackfield_curricula.by_arms import AbilityMixing, PassRateWindow, Thompson
from jackfield_curricula.by_difficulty import AdaptiveDifficulty


@hookimpl
def register_parts(register: Callable[..., None]) -> None:
    """Register each curriculum under its name."""
    register("curriculum", "pass_rate_window", PassRateWindow)
    register("curriculum", "adaptive_difficulty", AdaptiveDifficulty)
    register("curriculum", "thompson", Thompson)
    register("curriculum", "ability_mixing", AbilityMixing)
