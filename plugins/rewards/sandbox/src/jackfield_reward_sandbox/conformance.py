"""The fixture for ``jackfield plugins check``: a small task with inputs and outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TESTS = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
_SUM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
_SLOW = (
    "```python\nimport subprocess\nsubprocess.Popen(['sleep', '120'], start_new_session=True)\n"
    "while True:\n    pass\n```"
)


def fixture(folder: Path) -> dict[str, Any]:
    """Return settings, samples with scores, samples that cannot be scored, and one that never ends."""
    return {
        "settings": {"seconds": 100.0, "task_seconds": 100.0, "on_timeout": "fail"},
        "examples": [
            {"solution_str": _SUM, "ground_truth": _TESTS, "score": 1.0},
            {"solution_str": "```python\nprint(3)\n```", "ground_truth": _TESTS, "score": 0.5},
            {"solution_str": "I do not know.", "ground_truth": _TESTS, "score": 0.0},
        ],
        "failing": [{"solution_str": _SUM, "ground_truth": ""}],
        "slow": [{"solution_str": _SLOW, "ground_truth": _TESTS}],
    }
