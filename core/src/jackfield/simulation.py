"""The simulator of runs on virtual time, which the package ``jackfield-simulation`` has."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jackfield.errors import PluginError


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    try:
        return getattr(import_module("jackfield_simulation"), name)
    except ModuleNotFoundError as error:
        raise PluginError("no simulator", code="plugin.requirement", fix="pip install jackfield-simulation") from error
