"""Small instances of the operators for the conformance suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield_reward_requests import loopback_server

_BAD = ({"response": "no reward", "group": "0/0"}, {"response": 3, "reward": 1.0}, {"response": "a", "reward": "1"})
_REWARDS = (
    {"response": "no reward", "group": "0/0"},
    {"reward": True, "group": "0/0"},
    {"reward": "1", "group": "0/0"},
)
_ROWS = tuple(
    {"response": text, "reward": reward, "group": group, "log_prob_mean": log_prob, "response_tokens": len(text)}
    for text, reward, group, log_prob in (
        ("the answer is 7.", 1.0, "0/0", -0.25),
        ("7 7 7 7 7 7 7 7", 0.0, "0/0", -1.5),
        ("I think it is 7", 1.0, "0/1", -0.75),
        ("It is unknown", 0.0, "0/1", -2.0),
        ("seven", 0.5, "0/1", -3.25),
    )
)


def diversity(folder: Path) -> Mapping[str, Any]:
    """Compare responses of two groups."""
    return {"rows": _ROWS, "bad": _BAD}


def quality_rules(folder: Path) -> Mapping[str, Any]:
    """Apply all kinds of rules."""
    return {"settings": {"matches": {"number": "[0-9]"}, "lacks": {"doubt": "I think"}}, "rows": _ROWS, "bad": _BAD}


def quality_llm(folder: Path) -> Mapping[str, Any]:
    """Ask a model on loopback, which rates by the number of words."""
    asked = {"url": loopback_server("jackfield_operator_experiences.fake_model"), "model": "fake"}
    rows = tuple({"prompt": "How many?", **row} for row in _ROWS)
    unratable = {"prompt": "How many?", "response": "unratable", "reward": 1.0}
    settings = {"asked": asked, "on_failure": "set_aside"}
    return {"settings": settings, "rows": rows, "bad": (*_BAD, unratable)}


def length_reward(folder: Path) -> Mapping[str, Any]:
    """Have some responses within the band, and some beyond it."""
    bad = ({"reward": 1.0}, {"reward": 1.0, "response_tokens": "9"}, {"response_tokens": 9})
    return {"settings": {"low": 6, "high": 12, "width": 8}, "rows": _ROWS, "bad": bad}


def safety_penalty(folder: Path) -> Mapping[str, Any]:
    """Search expressions of two categories."""
    patterns = {"doubt": "think|knows", "digits": "7"}
    return {
        "settings": {"patterns": patterns, "words": {"doubt": ("unknown",)}, "per": "finding"},
        "rows": _ROWS,
        "bad": _BAD,
    }


def novelty(folder: Path) -> Mapping[str, Any]:
    """Remember two responses."""
    settings = {"memory": 2, "nearest": 1, "embedder": {"name": "hashed", "dimensions": 16}}
    return {"settings": settings, "rows": _ROWS, "bad": _BAD}


def utility(folder: Path) -> Mapping[str, Any]:
    """Weigh all parts."""
    return {"settings": {"surprise": 0.5, "reward": 0.25}, "rows": _ROWS, "bad": _REWARDS}


def salience(folder: Path) -> Mapping[str, Any]:
    """Keep everything, or half of each group."""
    return {"settings": {"minimum": -9.0}, "rows": _ROWS, "bad": _REWARDS, "kept": {"minimum": None, "share": 0.5}}


def reward_filter(folder: Path) -> Mapping[str, Any]:
    """Keep everything, or rewards from one half."""
    return {"rows": _ROWS, "bad": _REWARDS, "kept": {"minimum": 0.5}}
