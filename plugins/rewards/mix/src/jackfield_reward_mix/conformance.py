"""The fixture for ``jackfield plugins check``: two parts of jackfield-reward-rules, which has to be installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_FUNCTION = """
import subprocess
import threading


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "broken":
        raise ValueError("the ground truth is broken")
    if ground_truth == "slow":
        subprocess.Popen(["sleep", "120"])
        threading.Event().wait(120)
    return {"score": float(solution_str.strip() == ground_truth), "letters": min(len(solution_str), 100)}
"""


def fixture(folder: Path) -> dict[str, Any]:
    """Return settings, samples with scores, samples that cannot be scored, and one that never ends."""
    file = folder / "score.py"
    file.write_text(_FUNCTION, encoding="utf-8")
    equal = {"name": "function", "path": f"{file}:compute_score", "workers": 2}
    words = {"name": "rules", "method": "regex", "expected": "4.*"}
    return {
        "settings": {
            "parts": {"equal": equal, "words": words},
            "weights": {"equal": 1.0, "words": 0.5, "equal.letters": 0.25},
            "clip": {"equal.letters": [0.0, 2.0]},
        },
        "examples": [
            {"solution_str": "4", "ground_truth": "4", "score": 1.75},
            {"solution_str": "4 or 5", "ground_truth": "4", "score": 1.0},
            {"solution_str": "", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }
