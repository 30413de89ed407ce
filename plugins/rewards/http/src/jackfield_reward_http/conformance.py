"""A fixture for ``jackfield plugins check``: a service on loopback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jackfield_reward_requests import loopback_server


def service(folder: Path) -> dict[str, Any]:
    """Return settings of a service, samples with scores, one that cannot be scored, and one that never ends."""
    address = loopback_server("jackfield_reward_http.fake_service")
    return {
        "settings": {"url": f"{address}/score", "answer": {"score": "result.score", "explanation": "result.why"}},
        "comparing": {"url": f"{address}/rank", "group": {"body": {"answers": "{samples}"}, "answers": "ranking"}},
        "examples": [
            {"solution_str": "It is 4", "ground_truth": "4", "score": 1.0},
            {"solution_str": "It is 5", "ground_truth": "4", "score": 0.0},
        ],
        "failing": [{"solution_str": "4", "ground_truth": "broken"}],
        "slow": [{"solution_str": "4", "ground_truth": "slow"}],
    }
