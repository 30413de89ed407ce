"""Small instances of the operators for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.abc.reward import GeneratedText
from jackfield_reward_requests import loopback_server

_BAD = ({"prompt": 3}, {"answer": "there is no prompt"}, {"prompt": [{"role": "user"}, "text"]})


def semantic_duplicates(folder: Path) -> Mapping[str, Any]:
    """Compare prompts by hashed sequences of characters."""
    return {"bad": _BAD}


async def _generate(model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
    """Answer with one of three numbers, by the seed."""
    return GeneratedText(text=f"#### {sampling['seed'] % 3 + 6}", tokens=20)


async def _score(values: Mapping[str, Any], response: str) -> float:
    """Give 1 point for the number of the answer."""
    return float(str(values["answer"]).endswith(response))


def difficulty_pass_rate(folder: Path) -> Mapping[str, Any]:
    """Have a model guess, which no test trains."""
    context = {"generate": _generate, "score": _score}
    return {"settings": {"samples": 4}, "context": context, "bad": (*_BAD, {"prompt": "a task without an answer"})}


def difficulty_llm(folder: Path) -> Mapping[str, Any]:
    """Ask a model on loopback, which rates by the number of words."""
    address = loopback_server("jackfield_operator_models.fake_model")
    return {"settings": {"url": address, "model": "fake", "repairs": 1}, "bad": (*_BAD, {"prompt": "unratable"})}
