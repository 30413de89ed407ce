"""Fixtures of the core's own plugins, where the checks need more than their defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["function_reward"]

_FUNCTION = """
import subprocess
import threading


def compute_score(data_source, solution_str, ground_truth, extra_info):
    if ground_truth == "broken":
        raise ValueError("the ground truth is broken")
    if ground_truth == "slow":
        subprocess.Popen(["sleep", "120"])
        threading.Event().wait(120)
    return {"score": float(solution_str.strip() == ground_truth), "letters": len(solution_str)}
"""


def function_reward(folder: Path) -> dict[str, Any]:
    """A function in a file of its own, which can be right, wrong, broken and slow."""
    file = folder / "score.py"
    file.write_text(_FUNCTION, encoding="utf-8")
    return {
        "settings": {"path": f"{file}:compute_score", "workers": 2},
        "examples": [
            {"solution_str": "4", "ground_truth": "4", "score": 1.0},
            {"solution_str": "5", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }
