"""Answers of a judge behind an OpenAI-compatible API, for tests."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

_RESPONSE = re.compile(r"<response (\w+)>\n(.*?)\n</response \1>", re.DOTALL)


def responses(body: Any) -> list[str]:
    """Return the fenced responses that a request shows, in order."""
    return [found[2] for found in _RESPONSE.finditer(body["messages"][0]["content"])]


def completion(text: str | None, **more: Any) -> dict[str, Any]:
    """Return a chat completion."""
    usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return {"object": "chat.completion", "choices": [choice], "usage": usage, **more}


def says(text: str) -> Callable[[Any], Any]:
    """Return a judge that always says the same."""
    return lambda body: completion(text)


def scores(body: Any) -> Any:
    """Give the score that the response is."""
    return completion(json.dumps({"explanation": f"by {body['model']}", "score": float(responses(body)[0])}))


def prefers_greater(body: Any) -> Any:
    """Name the greater of two responses that are numbers."""
    first, second = map(float, responses(body))
    return completion(json.dumps({"winner": "tie" if first == second else "A" if first > second else "B"}))
