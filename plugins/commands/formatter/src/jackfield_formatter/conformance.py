"""Small instances of the operators for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def format(folder: Path) -> Mapping[str, Any]:
    """Make tasks of problems with answers."""
    bad = ({"prompt": 3}, {"something": "else"}, {"prompt": [{"role": "assistant", "content": "I begin."}]})
    return {"settings": {"into": "task"}, "bad": bad}


def split_text(folder: Path) -> Mapping[str, Any]:
    """Make pieces of texts."""
    rows = ({"text": "One line.\nAnother line.\nA third one."}, {"text": "Short.", "id": "b"}, {"text": "a b c d" * 9})
    bad = ({"text": 3}, {"text": "  "}, {"prompt": "There is no text."})
    return {"settings": {"size": 16}, "rows": rows, "bad": bad}
