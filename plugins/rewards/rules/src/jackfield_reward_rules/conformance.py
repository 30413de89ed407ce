"""What ``jackfield plugins check rules`` tries the rewards with: mathematics, which uses every part of the plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["mathematics"]


def mathematics(folder: Path) -> dict[str, Any]:
    """Settings, samples with their scores, samples that cannot be scored, and one that never ends."""
    return {
        "settings": {"method": "math", "format_score": 0.25, "seconds": 60.0, "on_timeout": "fail"},
        "examples": [
            {"solution_str": "So it is \\boxed{\\frac{1}{2}}.", "ground_truth": "0.5", "score": 1.0},
            {"solution_str": "So it is \\boxed{2}.", "ground_truth": "0.5", "score": 0.25},
            {"solution_str": "I do not know.", "ground_truth": "0.5", "score": 0.0},
        ],
        "failing": [{"solution_str": "\\boxed{2}", "ground_truth": ""}],
        "slow": [{"solution_str": "\\boxed{9!!!!!!!!!}", "ground_truth": "4"}],
    }
