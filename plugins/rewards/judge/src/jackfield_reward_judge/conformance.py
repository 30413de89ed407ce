"""A fixture for ``jackfield plugins check``: a judge on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield_reward_requests import loopback_server


def judge(folder: Path) -> dict[str, Any]:
    """Return settings of a judge, samples with scores, one that it cannot judge, and one that it never ends with."""
    address = loopback_server("jackfield_reward_judge.fake_judge")
    return {
        "settings": {"url": address, "model": "fake", "judges": [{}, {"model": "other"}], "quorum": 2},
        "comparing": {"pairwise": {}},
        "examples": [
            {"solution_str": "It is 4", "ground_truth": "4", "score": 1.0},
            {"solution_str": "It is 5", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }
