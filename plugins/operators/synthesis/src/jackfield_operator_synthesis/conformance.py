"""Small instances of the operators for the conformance suite: no test trains the model that they ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.abc.reward import GeneratedText

_ROWS = tuple(
    {
        "prompt": f"What is {a} and {b}?",
        "response": f"It is {a} and {b}. So {said}.",
        "reward": float(said == a + b),
        "ground_truth": str(a + b),
        "group": group,
        "conversation": [
            {"role": "user", "content": f"What is {a} and {b}?"},
            {"role": "assistant", "content": f"So {said}."},
        ],
    }
    for a, b, said, group in ((2, 3, 5, "0/0"), (2, 3, 6, "0/0"), (4, 3, 7, "0/1"), (4, 3, 1, "0/1"), (9, 9, 1, "0/2"))
)
_BAD = ({"prompt": "no response", "reward": 1.0, "group": "0/9"}, {"prompt": "a", "response": 3, "reward": 0.0})
_TRUTH = """
import re

def truth(row):
    return sum(map(int, re.findall(r"[0-9]+", row["prompt"])))
"""


async def _generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
    """Answer with a number that follows from the seed."""
    return GeneratedText(text=f"So {sampling['seed'] % 4 + 4}.", tokens=9)


async def _score(values: Mapping[str, Any], response: str) -> float:
    """Give 1 point for the number of the truth, and half a point to all others."""
    return 1.0 if f"So {values.get('ground_truth')}." in response else 0.5


def _fixture(**settings: Any) -> dict[str, Any]:
    context = {"generate": _generate, "score": _score}
    return {"settings": settings, "rows": _ROWS, "bad": _BAD, "context": context}


def repair(folder: Path) -> Mapping[str, Any]:
    """Ask the model twice."""
    return _fixture(attempts=2, gate={"minimum": 0.5})


def amplify(folder: Path) -> Mapping[str, Any]:
    """Ask for two variants."""
    return _fixture(variants=2, gate={"minimum": 0.5})


def splice(folder: Path) -> Mapping[str, Any]:
    """Cut after steps."""
    return {**_fixture(gate={"minimum": 0.5}), "bad": _BAD}


def counterfactual(folder: Path) -> Mapping[str, Any]:
    """Change a number, and add the numbers."""
    file = folder / "truth.py"
    file.write_text(_TRUTH)
    made = _fixture(function=f"{file}:truth", gate={"minimum": 0.5})
    return {**made, "bad": ({"prompt": 3, "reward": 1.0}, {"reward": 1.0})}


def summarize(folder: Path) -> Mapping[str, Any]:
    """Shorten everything of more than ten characters."""
    return _fixture(longer_than=10, gate={"minimum": 0.5})


def preference_pairs(folder: Path) -> Mapping[str, Any]:
    """Compare all rows of a group."""
    return {"settings": {"pairs": "all"}, "rows": _ROWS, "bad": (*_BAD, {"response": "a", "group": "0/1"})}
