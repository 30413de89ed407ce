"""Typed configuration: YAML and ``a.b=c`` overrides become a :class:`RunConfig`.

The classes of its sections are in :mod:`jackfield.config.sections`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from jackfield import settings
from jackfield.abc import KINDS
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.errors import ConfigError
from jackfield.settings import apply_override, default_of, read_yaml, structure

if TYPE_CHECKING:
    from jackfield.plugins import Registry

__all__ = ["RunConfig", "as_plain", "explain", "load_config", "make_config", "plugin_settings", "show"]


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file and apply ``a.b=c`` overrides; errors name the setting's path."""
    return make_config(read_yaml(Path(file)), overrides)


def make_config(values: Any, overrides: Sequence[str] = ()) -> RunConfig:
    """Make a configuration from plain values and overrides."""
    if isinstance(values, Mapping):
        for override in overrides:
            values = apply_override(_named(values), override)
        values = _named(values)
        for kind in KINDS:
            if isinstance(values.get(kind), Mapping):  # a plugin's settings are given next to its name
                settings = {"name": getattr(attrs.fields(RunConfig), kind).default.name, **values[kind]}
                values[kind] = {"name": settings.pop("name"), "settings": settings}
    return resolve_defaults(structure(RunConfig, values))


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn plugin sections that are only names into mappings, to which overrides can add."""
    return {key: {"name": value} if key in KINDS and isinstance(value, str) else value for key, value in values.items()}


#: The meaning of ``checkpoint_engine: auto`` by where replicas run; ``in_process`` reaches no other process.
_CHECKPOINT_ENGINES = {"this process": "in_process", "a process of this machine": "shared", "a cluster": "nccl"}


def resolve_defaults(config: RunConfig) -> RunConfig:
    """Resolve defaults by where workers run; refuse an engine that does not reach them."""
    chosen, cluster = config.checkpoint_engine, config.cluster
    reached = "a process of this machine" if "rollout" in cluster.interpreters else "this process"
    if cluster.name == "ray":
        reached = "a cluster"
    if chosen.name == "auto":
        chosen = attrs.evolve(chosen, name=_CHECKPOINT_ENGINES[reached])
    if chosen.name == "in_process" and reached != "this process":
        own = "cluster.name: ray" if cluster.name == "ray" else "cluster.interpreters.rollout"
        message = "the checkpoint engine 'in_process' cannot reach workers in other processes"
        expected = f"auto, {_CHECKPOINT_ENGINES[reached]}, or another engine that crosses processes"
        raise ConfigError(message, where="checkpoint_engine.name", expected=expected, found=f"in_process with {own}")
    return attrs.evolve(config, checkpoint_engine=chosen)


def plugin_settings(config: RunConfig, registry: Registry) -> dict[str, Any]:
    """Return the settings of each kind's plugin. Only the modules of their settings are imported."""
    found: dict[str, Any] = {}
    for kind, name in config.plugins.items():
        found[kind] = structure(registry.resolve(name, kind).settings_class, getattr(config, kind).settings, kind)
    return found


def show(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that :func:`load_config` reads back."""
    text: str = yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True)
    return text


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain values, in the form of a file."""
    lists = lambda _, __, value: list(value) if isinstance(value, tuple) else value  # noqa: E731 - as JSON has them
    values = attrs.asdict(config, value_serializer=lists)
    for kind in KINDS:
        values[kind] = {"name": values[kind]["name"], **values[kind]["settings"]}
    return values


def explain(config: RunConfig, registry: Registry | None = None) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield every setting as (path, value, default, help), plugins' settings included."""
    plugins = {} if registry is None else plugin_settings(config, registry)
    for field in attrs.fields(RunConfig):
        value, help, path = getattr(config, field.name), field.metadata["help"], field.name
        if isinstance(value, PluginSection):
            yield f"{path}.name", value.name, default_of(field).name, help
            value = plugins.get(path)
        elif not attrs.has(type(value)):
            yield path, value, default_of(field), help
        if attrs.has(type(value)):
            yield from settings.explain(value, path)
