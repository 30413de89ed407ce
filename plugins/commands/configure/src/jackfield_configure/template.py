"""A first config file, with the help text of each setting as its comment."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

import attrs
import yaml

from jackfield.algorithms.settings import algorithm as algorithm_of
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.plugins import discover

_WIDTH = 100
#: Settings of every file, apart from those that the answers give.
_ONLINE: Mapping[str, Mapping[str, Any]] = {
    "data": {"groups_per_batch": 32, "rollouts_per_group": 8},
    "sampling": {"temperature": 1.0, "max_new_tokens": 512},
    "optimizer": {"lr": 1e-6},
    "reward": {"name": "rules", "method": "math"},
}
_OFFLINE: Mapping[str, Mapping[str, Any]] = {"data": {"groups_per_batch": 32}, "optimizer": {"lr": 1e-5}}


def is_offline(name: str) -> bool:
    """Return whether an algorithm trains on given answers: it estimates no advantages."""
    return algorithm_of(name).advantages is None


def settings(algorithm: str, model: str, data: str, name: str) -> dict[str, Any]:
    """Return the settings of a run as a file has them; the algorithm decides the mode."""
    common = _OFFLINE if is_offline(algorithm) else _ONLINE
    return {
        "name": name,
        "folder": f"runs/{name}",
        "seed": 1,
        "mode": "offline" if is_offline(algorithm) else "online",
        "model": {"path": model},
        "data": {"train": data, **common["data"]},
        "algorithm": {"name": algorithm},
        **{section: dict(values) for section, values in common.items() if section != "data"},
        "schedule": {"steps": 100},
        "checkpoint": {"every": 20},
    }


def commented(values: Mapping[str, Any], file: str) -> str:
    """Return settings as YAML in which a comment above each setting says what it is for."""
    lines = [
        f"# A run of Jackfield. Check it: jackfield config validate {file}",
        f"# Start it: jackfield run {file}. All other settings, with their defaults: jackfield config explain {file}",
    ]
    for key, value in values.items():
        lines.append("")
        lines += _setting(RunConfig, key, value, "")
    return "\n".join(lines) + "\n"


def _setting(cls: type, key: str, value: Any, indent: str) -> list[str]:
    field = getattr(attrs.fields(attrs.resolve_types(cls)), key, None)
    help = "the plugin's name" if field is None and key == "name" else field.metadata.get("help", "") if field else ""
    head = textwrap.wrap(help, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ")
    if not isinstance(value, Mapping):
        return [*head, f"{indent}{key}: {_plain(value)}"]
    assert field is not None
    below = [
        line
        for name, each in value.items()
        for line in _setting(_class_of(field.type, value), name, each, indent + "  ")
    ]
    return [*head, f"{indent}{key}:", *below]


def _class_of(kind: type, value: Mapping[str, Any]) -> type:
    """Return the class of a section's settings; for a plugin, that of the plugin."""
    if kind is not PluginSection:
        return kind
    return discover().resolve(value["name"], "reward").settings_class


def _plain(value: Any) -> str:
    """Return a plain value as YAML on one line."""
    if isinstance(value, float):
        return f"{value:.1e}".replace("e-0", "e-") if value < 1e-3 else str(value)
    return str(yaml.safe_dump(value, allow_unicode=True, width=10_000)).removesuffix("\n").removesuffix("\n...")
