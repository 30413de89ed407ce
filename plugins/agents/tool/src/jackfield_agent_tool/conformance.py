"""A fixture for ``jackfield plugins check``: the model calls tools, in one turn also several at a time.

The suite's model has a token per letter and few of them, so the calls are in the shortest format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def fixture(folder: Path) -> dict[str, Any]:
    """Return tasks, the model's answers, and tools."""
    question = "What is 2 + 2 + 3, and how far is it to the sea?"
    answers = ["[add(a=2, b=2), far()]", "[add(a=4, b=3)]", "7, and 12 miles"]
    broken = ["[add(4)]", "[far()]", "no"]
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    return {
        "settings": {"format": "pythonic"},
        "tasks": [
            {"fields": {"messages": [{"role": "user", "content": question}], "ground_truth": "7"}, "answers": answers},
            {"fields": {"messages": [{"role": "user", "content": "And now?"}], "ground_truth": ""}, "answers": broken},
        ],
        "tools": [
            {"name": "add", "description": "Add two numbers", "parameters": parameters},
            {"name": "far", "description": "Tell how far the sea is", "results": ["The sea is 12 miles away."]},
        ],
    }


def images(folder: Path) -> dict[str, Any]:
    """Return the same tasks about an image, which the suite's tokenizer does not open."""
    made = fixture(folder)
    for task in made["tasks"]:
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        *before, last = task["fields"]["messages"]
        content = [image, {"type": "text", "text": last["content"]}]
        task["fields"]["messages"] = [*before, {**last, "content": content}]
    return made
