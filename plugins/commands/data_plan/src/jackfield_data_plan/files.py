"""Writes pipelines and thresholds into YAML files, whose comments stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jackfield.errors import ConfigError
from jackfield.files import replace_file
from jackfield_data_plan.parts import TASKS


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet, atomically; one that is there is refused with ``config.invalid-value``."""
    if path.exists():
        details: Any = {"where": str(path), "expected": "a new file", "fix": "remove it, or give another name"}
        raise ConfigError("the file is there already", **details)
    replace_file(path, text)


def set_thresholds(path: Path, number: int, settings: Mapping[str, Any]) -> None:
    """Set settings of an operator in a run's file, atomically.

    The rest of the file stays as it is, byte by byte. A file in which that cannot be done is refused.
    """
    text = path.read_bytes().decode("utf-8")
    expected = _unshared(yaml.safe_load(text))
    expected["data"]["pipeline"]["tasks"][number].update(settings)
    for name, value in settings.items():
        text = _with_setting(text, number, name, value, path)
    if _unshared(yaml.safe_load(text)) != expected:
        raise _refused(path, "the edited file would say something else")
    replace_file(path, text)


def _unshared(value: Any) -> Any:
    """Return a copy in which what YAML's aliases share is there twice."""
    if isinstance(value, dict):
        return {key: _unshared(each) for key, each in value.items()}
    return [_unshared(each) for each in value] if isinstance(value, list) else value


def _with_setting(text: str, number: int, name: str, value: Any, path: Path) -> str:
    node: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    for key in ("data", "pipeline", "tasks", number):
        node = _inner(node, key, path)
    if not isinstance(node, yaml.MappingNode):
        raise _refused(path, "the operator is no mapping")
    written = (
        yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True).removesuffix("...\n").strip()
    )
    for key, found in node.value:
        if key.value == name:
            start, end = found.start_mark.index, found.end_mark.index
            if isinstance(found, yaml.CollectionNode) and not found.flow_style:
                raise _refused(path, f"{name} is written over several lines")
            return f"{text[:start]}{written}{text[end:]}"
    first, last = node.value[0][0], node.value[-1][1]
    if node.flow_style:
        end = last.end_mark.index
        return f"{text[:end]}, {name}: {written}{text[end:]}"
    indent, value = " " * first.start_mark.column, node.value[0][1]
    if isinstance(value, yaml.ScalarNode) and value.style in (None, "'", '"'):  # on a line of its own below the first
        line = text.find("\n", value.end_mark.index)
        end = len(text) if line < 0 else line
        return f"{text[:end]}\n{indent}{name}: {written}{text[end:]}"
    start = first.start_mark.index
    return f"{text[:start]}{name}: {written}\n{indent}{text[start:]}"


def _inner(node: Any, key: str | int, path: Path) -> Any:
    if isinstance(node, yaml.MappingNode):
        for name, found in node.value:
            if name.value == key:
                return found
    if isinstance(node, yaml.SequenceNode) and isinstance(key, int):
        return node.value[key]
    raise _refused(path, f"{key} is not there")


def _refused(path: Path, found: str) -> ConfigError:
    fix = f"set the thresholds in {TASKS} by hand"
    what = "the thresholds cannot be written into the file"
    return ConfigError(what, where=str(path), expected=TASKS, found=found, fix=fix)


def changed(values: Any, tasks: Sequence[Mapping[str, Any]], folder: str | None = None) -> dict[str, Any]:
    """Return plain settings of a run with other operators, and another folder for their rows."""
    data = dict(values.get("data") or {})
    pipeline = {**(data.get("pipeline") or {}), "tasks": [dict(task) for task in tasks]}
    if folder is not None:
        pipeline["folder"] = folder
    return {**values, "data": {**data, "pipeline": pipeline}}
