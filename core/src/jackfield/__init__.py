"""Jackfield: reinforcement-learning post-training of language models, built from plugins."""

from __future__ import annotations

from importlib.metadata import version as _version

__all__ = ["__version__"]

__version__ = _version("jackfield")
