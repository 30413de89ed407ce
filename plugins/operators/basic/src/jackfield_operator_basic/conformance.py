"""Small instances of the operators for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_BAD = ({"prompt": 3}, {"answer": "there is no prompt"}, {"prompt": [{"role": "user"}, "text"]})
_CODE = '''"""Functions of a user."""


def shorter(row):
    return {"prompt": row["prompt"][:10], "words": len(row["prompt"].split())}


async def words(row, more=0):
    return len(row["prompt"].split()) + more


def sentences(row):
    return [{"prompt": part, "sentence": number} for number, part in enumerate(row["prompt"].split(". "))]
'''


def length(folder: Path) -> Mapping[str, Any]:
    """Keep everything, or what has 45 characters."""
    return {"bad": _BAD, "kept": {"minimum": 45}}


def words(folder: Path) -> Mapping[str, Any]:
    """Count a word that some rows have once."""
    return {"settings": {"words": ("toys",), "maximum": 9}, "bad": _BAD, "kept": {"maximum": 0}}


def safety(folder: Path) -> Mapping[str, Any]:
    """Look for shipped words and for one that some rows have."""
    return {"settings": {"words": {"toys": ("toys",)}, "maximum": 9}, "bad": _BAD, "kept": {"maximum": 0}}


def language(folder: Path) -> Mapping[str, Any]:
    """Tell English from German."""
    texts = ("There were 7 cards on the table.", "Auf dem Tisch lagen sieben Karten.", "7 + 8", "Who has the cards?")
    return {"rows": tuple({"prompt": text} for text in texts), "bad": _BAD, "kept": {"languages": ("en",)}}


def duplicates(folder: Path) -> Mapping[str, Any]:
    """Compare the prompts of rows."""
    return {"bad": _BAD}


def difficulty(folder: Path) -> Mapping[str, Any]:
    """Look at prompt and answer."""
    return {"bad": _BAD}


def priority(folder: Path) -> Mapping[str, Any]:
    """Order by two scores."""
    rows = ({"a": 1.0, "b": 2}, {"a": -1.0, "b": 0}, {"a": 0.5, "b": 3})
    bad = ({"a": 1.0}, {"a": "1", "b": 1}, {"a": True, "b": 1}, {"a": 1.0, "b": None})
    return {"settings": {"weights": {"a": -1.0, "b": 0.5}}, "rows": rows, "bad": bad}


def select(folder: Path) -> Mapping[str, Any]:
    """Keep two rows by chance."""
    return {"settings": {"order": "random", "limit": 2}}


def per_category(folder: Path) -> Mapping[str, Any]:
    """Keep one row of each kind, or all."""
    rows = tuple({"kind": kind} for kind in ("a", "b", "a", 1, "a", 1))
    return {"settings": {"category": "kind", "limit": 9}, "rows": rows, "bad": ({},), "kept": {"limit": 1}}


def _code(folder: Path, function: str) -> str:
    file = folder / "functions.py"
    file.write_text(_CODE, encoding="utf-8")
    return f"{file}:{function}"


def function_mapper(folder: Path) -> Mapping[str, Any]:
    """Cut the prompt, and count its words."""
    settings = {"path": _code(folder, "shorter"), "reads": ("prompt",), "writes": ("prompt", "words")}
    return {"settings": settings, "bad": ({"prompt": 3}, {})}


def function_filter(folder: Path) -> Mapping[str, Any]:
    """Keep prompts by a number of words."""
    settings = {"path": _code(folder, "words"), "keywords": {"more": 1}, "reads": ("prompt",), "writes": "words"}
    return {"settings": settings, "bad": ({"prompt": 3}, {}), "kept": {"minimum": 11.0}}


def function_synthesizer(folder: Path) -> Mapping[str, Any]:
    """Make a row of each sentence."""
    return {"settings": {"path": _code(folder, "sentences")}, "bad": ({"prompt": 3}, {})}
