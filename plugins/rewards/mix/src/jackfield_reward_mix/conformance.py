"""The fixture for ``jackfield plugins check``: two parts by rules, which need jackfield-reward-rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fixture(folder: Path) -> dict[str, Any]:
    """Return settings, samples with scores, samples that cannot be scored, and one that never ends."""
    mathematics = {"name": "rules", "method": "math", "seconds": 60.0, "on_timeout": "fail"}
    words = {"name": "rules", "method": "regex", "expected": r".*So it is.*"}
    return {
        "settings": {
            "parts": {"math": mathematics, "words": words},
            "weights": {"math": 1.0, "words": 0.5, "math.well_formed": 0.25},
            "clip": {"words": [0.0, 1.0]},
        },
        "examples": [
            {"solution_str": "So it is \\boxed{\\frac{1}{2}}.", "ground_truth": "0.5", "score": 1.75},
            {"solution_str": "Maybe \\boxed{2}.", "ground_truth": "0.5", "score": 0.25},
            {"solution_str": "I do not know.", "ground_truth": "0.5", "score": 0.0},
        ],
        "failing": [{"solution_str": "\\boxed{2}", "ground_truth": ""}],
        "slow": [{"solution_str": "\\boxed{9!!!!!!!!!}", "ground_truth": "4"}],
    }
