"""A fixture for ``jackfield plugins check``: tasks with images."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def images(folder: Path) -> dict[str, Any]:
    """Return two tasks that ask about an image, which the suite's tokenizer does not open."""

    def task(name: str, question: str, answer: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{name}"}}
        content = [image, {"type": "text", "text": question}]
        return {"fields": {"messages": [{"role": "user", "content": content}]}, "answers": [answer]}

    return {"tasks": [task("AAAA", "which colour?", "red"), task("BBBB", "which shape?", "round")]}
