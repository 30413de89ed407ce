"""Reading, overriding, checking, showing and explaining a run's configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from jackfield.abc import KINDS
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.errors import ConfigError
from jackfield.structuring import structure, unstructure

if TYPE_CHECKING:
    from jackfield.plugins import Registry

__all__ = [
    "as_plain",
    "explain",
    "load_config",
    "make_config",
    "parse_override",
    "plugin_sections",
    "show",
    "validate_plugins",
]


def load_config(file: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply ``a.b=c`` overrides and structure the result.

    Raises:
        ConfigError: ``config.unreadable``, ``config.override`` or what :func:`jackfield.structuring.structure` raises.
    """
    path = Path(file)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            "the configuration file does not exist", code="config.unreadable", where=str(path), fix="check the path"
        ) from error
    except (yaml.YAMLError, RecursionError, ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise ConfigError(
            "the configuration file cannot be read as YAML", code="config.unreadable", where=str(path), found=error
        ) from error
    return make_config({} if values is None else values, overrides)


def make_config(values: Any, overrides: Sequence[str] = ()) -> RunConfig:
    """Structure plain values after overrides."""
    if not isinstance(values, Mapping):
        return structure(RunConfig, values)
    merged = _copy(values)
    for override in overrides:
        keys, value = parse_override(override)
        _set(merged, keys, value, override)
    for name in plugin_sections():
        if name in merged:
            merged[name] = _nest(merged[name], name)
    return _resolved(structure(RunConfig, merged))


#: What ``checkpoint_engine: auto`` stands for, by who has to be reached: ``in_process`` reaches no other process.
_CHECKPOINT_ENGINES = {"this process": "in_process", "a process of this machine": "shared", "a cluster": "nccl"}


def _resolved(config: RunConfig) -> RunConfig:
    """Every default that depends on the runtime."""
    chosen, runtime = config.checkpoint_engine, config.runtime
    reached = "a process of this machine" if "rollout" in runtime.interpreters else "this process"
    if runtime.name == "ray":
        reached = "a cluster"
    if chosen.name == "auto":
        chosen = attrs.evolve(chosen, name=_CHECKPOINT_ENGINES[reached])
    if chosen.name == "in_process" and reached != "this process":
        own = "runtime.name: ray" if runtime.name == "ray" else "runtime.interpreters.rollout"
        raise ConfigError(
            "the checkpoint engine 'in_process' cannot reach workers in other processes",
            where="checkpoint_engine.name",
            expected=f"auto, {_CHECKPOINT_ENGINES[reached]}, or another engine that crosses processes",
            found=f"in_process with {own}",
        )
    return attrs.evolve(config, checkpoint_engine=chosen)


def parse_override(text: str) -> tuple[list[str], Any]:
    """``a.b=c`` as the path ``["a", "b"]`` and the value ``c``, read as YAML."""
    path, sign, value = text.partition("=")
    keys = path.strip().split(".")
    if not sign or not all(keys):
        raise ConfigError(
            f"cannot read the override {text!r}",
            code="config.override",
            expected="key.path=value",
            found=text,
            fix="write for example schedule.steps=10",
        )
    try:
        return keys, yaml.safe_load(value)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        shown = text if len(text) <= 200 else text[:200] + "…"
        raise ConfigError(
            f"the value of the override {shown!r} is not YAML", code="config.override", where=path, found=error
        ) from error


def plugin_sections() -> dict[str, str]:
    """The sections that name a plugin: section to kind (which have one name)."""
    return {name: name for name in KINDS if name in attrs.fields_dict(RunConfig)}


def validate_plugins(config: RunConfig, registry: Registry) -> None:
    """Check every plugin section against its plugin's own schema, importing config modules only.

    Raises:
        PluginError: the plugin is not there, broken or of another ABI.
        ConfigError: its settings are wrong.
    """
    for section, kind in plugin_sections().items():
        chosen: PluginSection = getattr(config, section)
        structure(registry.settings_class(kind, chosen.name), chosen.settings, section)


def show(config: RunConfig) -> str:
    """The resolved configuration as YAML that :func:`load_config` reads back."""
    text: str = yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True)
    return text


def as_plain(config: RunConfig) -> dict[str, Any]:
    """The resolved configuration as plain values, plugin settings beside the plugin's name."""
    values = _listed(unstructure(config))
    for section in plugin_sections():
        chosen = values[section]
        values[section] = {"name": chosen["name"], **chosen["settings"]}
    return values  # type: ignore[no-any-return]


def explain(config: RunConfig, registry: Registry | None = None) -> Iterator[tuple[str, Any, Any, str]]:
    """Every setting as (path, value, default, help), plugin settings included where the plugin is installed."""
    for field in attrs.fields(RunConfig):
        value = getattr(config, field.name)
        if isinstance(value, PluginSection):
            yield field.name + ".name", value.name, _default(field).name, field.metadata["help"]
            if registry is not None:
                cls = registry.settings_class(field.name, value.name)
                yield from _explain(structure(cls, value.settings, field.name), field.name)
        else:
            yield from _explain_field(field, value, "")


def _explain(section: Any, path: str) -> Iterator[tuple[str, Any, Any, str]]:
    for field in attrs.fields(type(section)):
        yield from _explain_field(field, getattr(section, field.name), path + ".")


def _explain_field(field: Any, value: Any, prefix: str) -> Iterator[tuple[str, Any, Any, str]]:
    if attrs.has(type(value)):
        yield from _explain(value, prefix + field.name)
    else:
        yield prefix + field.name, value, _default(field), field.metadata.get("help", "")


def _default(field: Any) -> Any:
    if field.default is attrs.NOTHING:
        return "(required)"
    return field.default.factory() if isinstance(field.default, attrs.Factory) else field.default  # type: ignore[arg-type]


def _nest(section: Any, name: str) -> Any:
    if isinstance(section, str):
        return {"name": section}
    if not isinstance(section, Mapping):
        raise ConfigError(
            f"wrong value at {name}: a plugin section names a plugin",
            code="config.wrong-type",
            where=name,
            expected=f"{name}: {{name: NAME, its settings}}",
            found=repr(section),
        )
    settings = {key: value for key, value in section.items() if key != "name"}
    default = {field.name: _default(field) for field in attrs.fields(RunConfig)}[name].name
    return {"name": section.get("name", default), "settings": settings}


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _listed(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _listed(item) for key, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, tuple | list) else value


def _set(values: dict[str, Any], keys: list[str], value: Any, override: str) -> None:
    for depth, key in enumerate(keys[:-1]):
        inner = values.get(key)
        if isinstance(inner, str) and depth == 0 and key in plugin_sections():
            inner = {"name": inner}
        if inner is None:
            inner = {}
        if not isinstance(inner, dict):
            raise ConfigError(
                f"the override {override!r} goes through a value",
                code="config.override",
                where=".".join(keys[: depth + 1]),
                expected="keys and values",
                found=repr(inner),
            )
        values[key] = inner
        values = inner
    values[keys[-1]] = value
