"""Jackfield: reinforcement-learning post-training of language models, built from plugins."""

from __future__ import annotations

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """Look the version up on first use: it takes longer than much that a small process does."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jackfield")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
