"""Parts of other packages, which are imported where they are used, and texts that are safe to print."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import yaml

from jackfield.compose.libraries import pipelines
from jackfield.errors import PluginError

TASKS = "data.pipeline.tasks"  #: the setting with the operators


def pipeline_part(name: str) -> Any:
    """Return a module of jackfield-pipelines; raise ``plugin.requirement`` if that is not installed."""
    pipelines()
    return import_module(f"jackfield_pipelines.{name}")


def schema_part() -> Any:
    """Return the module of jackfield-configure that makes JSON Schemas."""
    try:
        return import_module("jackfield_configure.schema")
    except ModuleNotFoundError as error:
        fix = "pip install jackfield-configure"
        raise PluginError(
            "schemas of operators need jackfield-configure", code="plugin.requirement", fix=fix
        ) from error


def plain(text: object, most: int = 200) -> str:
    """Return a text in one line without control characters, which a terminal would obey, and shortened."""
    joined = " ".join(str(text).split())
    shown = "".join(letter if letter.isprintable() else "�" for letter in joined)
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def shortened(value: Any, most: int = 200) -> Any:
    """Return a JSON value whose texts, lists and objects are short enough to be shown."""
    if isinstance(value, str):
        return plain(value, most)
    if isinstance(value, list | tuple):
        return [shortened(each, most) for each in value[:5]]
    if isinstance(value, Mapping):
        return {plain(key, 50): shortened(each, most) for key, each in list(value.items())[:12]}
    return value


def as_yaml(tasks: list[dict[str, Any]], **data: Any) -> str:
    """Return the section ``data`` with operators as YAML."""
    section = {"data": {**data, "pipeline": {"tasks": tasks}}}
    return str(yaml.safe_dump(section, sort_keys=False, allow_unicode=True, width=math.inf))
