"""Jackfield: reinforcement-learning post-training of language models, built from plugins."""

from __future__ import annotations

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """Look up the version on first use, because this is slow for a small process."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jackfield")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
