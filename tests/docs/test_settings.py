"""The table of settings is what the code says, and the code says what each setting is for."""

from __future__ import annotations

import ast
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import attrs

from jackfield.abc import KINDS
from jackfield.config import RunConfig
from jackfield.plugins import discover

TOOL = Path(__file__).parents[2] / "tools" / "config_reference.py"


def test_the_table_of_settings_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, timeout=50, check=False
    )
    assert 0 == done.returncode, done.stderr


def test_every_setting_of_an_installed_plugin_says_what_it_is_for() -> None:
    registry = discover()
    silent = [
        f"{record.label}: {field.name}"
        for record in registry.records()
        for field in attrs.fields(record.settings_class)
        if not field.metadata.get("help")
    ]
    assert [] == silent


#: Settings that are read through a table of names: one observer each, one part of the batch each, and a limit.
BY_TABLE = {"metrics_file", "sample_table", "timeline", "device_seconds"}
BY_TABLE |= {"disk_bytes", "output_bytes"}  # limits of a sandbox, which its processes get as plain values


def test_every_setting_is_read_by_something() -> None:
    """Each field of the configuration, and of a plugin's own, is read somewhere in the packages."""
    registry, root = discover(), Path(__file__).parents[2]
    classes: list[type] = [RunConfig]
    classes += [record.settings_class for record in registry.records()]
    settings = {name for cls in classes for name in _settings(cls)}
    sources = [*root.glob("core/src/**/*.py"), *root.glob("plugins/*/*/src/**/*.py")]
    read = {name for source in sources for name in _read(ast.parse(source.read_text(encoding="utf-8")))}
    assert len(settings) > 100
    assert BY_TABLE == settings - read - set(KINDS), "sections of plugins are read by their kind"


def _read(module: ast.Module) -> Iterator[str]:
    """Names that are read as attributes, and parameters that are read in their function: options come by name."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.attr
        elif isinstance(node, ast.FunctionDef):
            parameters = {each.arg for each in (*node.args.args, *node.args.kwonlyargs)}
            loads = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load))
            yield from (each.id for each in loads if each.id in parameters)


def _settings(cls: type) -> Iterator[str]:
    """Names of all fields of a class of settings, and of the classes of settings in it."""
    for field in attrs.fields(attrs.resolve_types(cls)):
        yield field.name
        for inner in (field.type, *typing.get_args(field.type)):
            if isinstance(inner, type) and attrs.has(inner):
                yield from _settings(inner)
