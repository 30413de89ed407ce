"""Jackfield: reinforcement-learning post-training of language models, built from plugins."""

from __future__ import annotations

__all__ = ["__version__"]

__version__: str


def __getattr__(name: str) -> str:
    """The version, when somebody asks: looking it up takes longer than many a small process has to do."""
    if name == "__version__":
        from importlib.metadata import version

        return version("jackfield")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
