"""Small instances of the operators for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BAD = ({"prompt": 3}, {"answer": "there is no prompt"}, {"prompt": [{"role": "user"}, "text"]})


def length(folder: Path) -> Mapping[str, Any]:
    """Keep everything, or what has 45 characters."""
    return {"bad": _BAD, "kept": {"minimum": 45}}


def words(folder: Path) -> Mapping[str, Any]:
    """Count a word that some rows have once."""
    return {"settings": {"words": ("toys",), "maximum": 9}, "bad": _BAD, "kept": {"maximum": 0}}


def duplicates(folder: Path) -> Mapping[str, Any]:
    """Compare prompts."""
    return {"bad": _BAD}


def difficulty(folder: Path) -> Mapping[str, Any]:
    """Look at prompt and answer."""
    return {"bad": _BAD}


def priority(folder: Path) -> Mapping[str, Any]:
    """Order by two scores."""
    rows = ({"a": 1.0, "b": 2}, {"a": -1.0, "b": 0}, {"a": 0.5, "b": 3})
    bad = ({"a": 1.0}, {"a": "1", "b": 1}, {"a": True, "b": 1})
    return {"settings": {"weights": {"a": -1.0, "b": 0.5}}, "rows": rows, "bad": bad}
