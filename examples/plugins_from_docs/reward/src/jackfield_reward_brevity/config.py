"""Settings of the reward."""

from __future__ import annotations

import attrs

from jackfield.sdk import option


@attrs.frozen(kw_only=True)
class Config:
    """What a right answer is worth, and what length costs."""

    correct: float = option(1.0, help="score of a right answer")
    penalty: float = option(0.25, help="taken from the longest right answer of a group; the shortest loses nothing")
