"""Fixtures for ``jackfield plugins check``: mathematics, a function in its own file, and an object of this process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from jackfield_reward_rules.callables import KNOWN

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


def ranks(prompts, completions, **columns):
    lengths = [len(str(each)) for each in completions]
    return [float(sorted(lengths).index(length)) for length in lengths]
"""


def mathematics(folder: Path) -> dict[str, Any]:
    """Return settings, samples with scores, samples that cannot be scored, and one that never ends."""
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


def function(folder: Path) -> dict[str, Any]:
    """Return settings for a function in its own file, which can be right, wrong, broken and slow."""
    file = folder / "score.py"
    file.write_text(_FUNCTION, encoding="utf-8")
    return {
        "settings": {"path": f"{file}:compute_score", "workers": 2},
        "comparing": {"path": f"{file}:ranks"},
        "examples": [
            {"solution_str": "4", "ground_truth": "4", "score": 1.0},
            {"solution_str": "5", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }


def callable_object(folder: Path) -> dict[str, Any]:
    """Return settings for closures of this process, which can be right, wrong, broken and slow."""

    def score(solution_str: str, ground_truth: str) -> float:
        if ground_truth == "broken":
            raise ValueError("the ground truth is broken")
        if ground_truth == "slow":
            threading.Event().wait(120)
        return float(solution_str.strip() == ground_truth)

    def ranks(prompts: list[Any], completions: list[Any], **columns: list[Any]) -> list[float]:
        lengths = [len(str(each)) for each in completions]
        return [float(sorted(lengths).index(length)) for length in lengths]

    KNOWN.update({"conformance-score": score, "conformance-ranks": ranks})
    return {
        "settings": {"path": "conformance-score"},
        "comparing": {"path": "conformance-ranks"},
        "examples": [
            {"solution_str": "4", "ground_truth": "4", "score": 1.0},
            {"solution_str": "5", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }
