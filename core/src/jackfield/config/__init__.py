"""Typed configuration: YAML and ``a.b=c`` overrides become a :class:`RunConfig`.

The classes of its sections are in :mod:`jackfield.config.sections`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import yaml

from jackfield.abc import SECTIONS
from jackfield.config.sections import PluginSection, RunConfig
from jackfield.errors import ConfigError
from jackfield.settings import structure

if TYPE_CHECKING:
    from jackfield.plugins import Registry

__all__ = ["RunConfig", "as_plain", "explain", "load_config", "load_stages", "make_config", "plugin_settings", "show"]


class _Loader(yaml.SafeLoader):
    """Refuses a key that is twice in a mapping; PyYAML takes the last value."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node, keys = super().compose_mapping_node(anchor), set[str]()
        for key, _ in node.value:
            if str(key.value) in keys:
                raise yaml.MarkedYAMLError(problem=f"the key {key.value!r} is there twice", problem_mark=key.start_mark)
            keys.add(str(key.value))
        return node


def load_config(file: str | Path, overrides: Sequence[str] = (), *, served: bool = False) -> RunConfig:
    """Read a YAML file and apply ``a.b=c`` overrides; errors name the setting's path.

    ``served``: the queue's controller is in a process of its own, as for ``jackfield queue serve`` and for each role.
    """
    return make_config(_read(file), overrides, served=served)


def load_stages(file: str | Path, overrides: Sequence[str] = (), *, served: bool = False) -> dict[str, RunConfig]:
    """Read a file's ``stages`` by name; a file without them has one, whose name is empty. ``served`` ones are refused.

    A stage's settings replace the file's, and overrides replace both. Its folder is ``FOLDER/NUMBER-NAME``, and its
    model that of the stage before it, unless it names one.
    """
    values, made = _read(file), dict[str, RunConfig]()
    if served or not (isinstance(values, Mapping) and values.get("stages")):
        return {"": make_config(values, overrides, served=served)}
    known = structure(dict[str, dict[str, Any]], values["stages"], "stages").keys()
    for override in overrides:
        values = apply_override(_named(values), override)
    stages = structure(dict[str, dict[str, Any]], values.pop("stages"), "stages")
    for name in sorted(known ^ stages.keys()):
        shown = {"expected": ", ".join(known), "found": ", ".join(stages) or "none", "fix": "correct the name"}
        raise ConfigError("the stages are the file's", code="config.unknown-key", where=f"stages.{name}", **shown)
    overrides, model = [each for each in overrides if not each.startswith("stages.")], None
    for number, (name, own) in enumerate(stages.items(), 1):
        config = make_config(_merged(_named(values), _named(own)), overrides)
        folder, given = str(Path(config.folder, f"{number}-{name}")), "path" in own.get("model", ())
        path = config.model.path if given or model is None else model
        renamed = attrs.evolve(config, name=f"{config.name}-{name}", folder=folder)
        made[name] = attrs.evolve(renamed, model=attrs.evolve(config.model, path=path))
        model = f"{folder}/model"
    return made


def _merged(common: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with others in their place; sections are merged, unless they get another ``name``."""
    both = {key: (common[key], own[key]) for key in own.keys() & common.keys() if key != "name"}
    maps = {key: pair for key, pair in both.items() if all(isinstance(each, Mapping) for each in pair)}
    same = {key: pair for key, pair in maps.items() if pair[1].get("name") in (None, pair[0].get("name"))}
    return {**common, **own, **{key: _merged(*pair) for key, pair in same.items()}}


def _read(file: str | Path) -> Any:
    """Return a YAML file's values. One that is missing, no YAML, or has a key twice is ``config.unreadable``."""
    refused = partial(ConfigError, code="config.unreadable", where=str(file))
    try:
        values = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
        return {} if values is None else values
    except FileNotFoundError as error:
        fix = (
            "the file comes first, and key=value after it" if "=" in str(file) else f"check the path from {Path.cwd()}"
        )
        raise refused("the configuration file does not exist", fix=fix) from error
    except (yaml.YAMLError, RecursionError, ValueError, OSError) as error:  # UnicodeDecodeError is a ValueError
        raise refused("the configuration file cannot be read as YAML", found=error) from error


def make_config(values: Any, overrides: Sequence[str] = (), *, served: bool = False) -> RunConfig:
    """Make a configuration from plain values and overrides; ``served`` as for :func:`load_config`."""
    if isinstance(values, Mapping):
        for override in overrides:
            values = apply_override(_named(values), override)
        values = _named(values)
        if isinstance(values.get("reward"), list):
            values["reward"] = {"name": "mix", "parts": values["reward"]}
        for kind in SECTIONS:
            if isinstance(values.get(kind), Mapping):  # a plugin's settings are given next to its name
                settings = {"name": getattr(attrs.fields(RunConfig), kind).default.name, **values[kind]}
                values[kind] = {"name": settings.pop("name"), "settings": settings}
    config = structure(RunConfig, values)
    return resolve_defaults(config.with_address() if served else config)


def apply_override(values: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a copy of the values with ``a.b=c`` applied, where ``c`` is YAML, or raise ``config.override``."""
    path, sign, value = text.partition("=")
    keys, shown = path.strip().split("."), text if len(text) <= 200 else text[:200] + "…"
    refused = partial(ConfigError, code="config.override")
    if not sign or not all(keys):
        fix = "write for example schedule.steps=10"
        raise refused(f"cannot read the override {shown!r}", expected="key.path=value", found=shown, fix=fix)
    applied = inner = dict(values)
    for depth, key in enumerate(keys[:-1], 1):
        below = {} if inner.get(key) is None else inner[key]
        if not isinstance(below, Mapping):
            details = {"where": ".".join(keys[:depth]), "expected": "keys and values", "found": repr(below)}
            raise refused(f"the override {shown!r} goes through a value", **details)
        inner[key] = inner = dict(below)
    try:
        inner[keys[-1]] = yaml.load(value, _Loader)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise refused(f"the value of the override {shown!r} is not YAML", where=path, found=error) from error
    return applied


def _named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Turn sections that are only names, of plugins and the algorithm, into mappings, to which overrides can add."""
    sections = {*SECTIONS, "algorithm"}
    return {
        key: {"name": value} if key in sections and isinstance(value, str) else value for key, value in values.items()
    }


#: The meaning of ``checkpoint_engine: auto`` by where replicas run; ``in_process`` reaches no other process, and NCCL
#: refuses two processes that share a GPU.
_CHECKPOINT_ENGINES = {"this process": "in_process", "a process of this machine": "shared", "a cluster": "nccl"}


def resolve_defaults(config: RunConfig) -> RunConfig:
    """Resolve defaults by where workers and the controller run; refuse an engine that does not reach them."""
    chosen, cluster = config.checkpoint_engine, config.cluster
    reached = "a process of this machine" if "rollout" in cluster.interpreters else "this process"
    if cluster.name == "ray":
        alone = cluster.device == "cuda" and cluster.shares_devices and cluster.ray.address is None
        reached = "a process of this machine" if alone else "a cluster"
    elif reached != "this process" and cluster.device == "cuda" and not cluster.shares_devices:
        reached = "a cluster"  # a process with a GPU of its own
    if chosen.name == "auto":
        chosen = attrs.evolve(chosen, name=_CHECKPOINT_ENGINES[reached])
    if chosen.name == "in_process" and reached != "this process":
        own = "cluster.name: ray" if cluster.name == "ray" else "cluster.interpreters.rollout"
        message = "the checkpoint engine 'in_process' cannot reach workers in other processes"
        expected = f"auto, {_CHECKPOINT_ENGINES[reached]}, or another engine that crosses processes"
        found, fix = f"in_process with {own}", f"set checkpoint_engine.name: auto, or leave out {own}"
        raise ConfigError(message, where="checkpoint_engine.name", expected=expected, found=found, fix=fix)
    if (queue := config.transfer_queue).name == "auto":
        joined = cluster.name == "ray" or config.queue.address is not None
        queue = attrs.evolve(queue, name="zmq" if joined else "memory")
    return attrs.evolve(config, checkpoint_engine=chosen, transfer_queue=queue)


def automatic_plugins(config: RunConfig) -> dict[str, str]:
    """Return the names that ``auto`` stands for in this configuration, by the paths of the settings."""
    auto = PluginSection(name="auto")
    resolved = resolve_defaults(attrs.evolve(config, checkpoint_engine=auto, transfer_queue=auto))
    return {f"{kind}.name": getattr(resolved, kind).name for kind in ("checkpoint_engine", "transfer_queue")}


def plugin_settings(config: RunConfig, registry: Registry) -> dict[str, Any]:
    """Return the settings of each kind's plugin. Only the modules of their settings are imported."""
    classes = {kind: registry.resolve(name, kind).settings_class for kind, name in config.plugins.items()}
    return {kind: structure(cls, getattr(config, kind).settings, kind) for kind, cls in classes.items()}


def show(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that :func:`load_config` reads back."""
    return str(yaml.safe_dump(as_plain(config), sort_keys=False, allow_unicode=True))


def as_plain(config: RunConfig) -> dict[str, Any]:
    """Return the resolved configuration as plain values, in the form of a file."""
    lists = lambda _, __, value: list(value) if isinstance(value, tuple) else value  # noqa: E731 - as JSON has them
    values = attrs.asdict(config, value_serializer=lists)
    for kind in SECTIONS:
        values[kind] = {"name": values[kind]["name"], **values[kind]["settings"]}
    return values


def explain(settings: Any, registry: Registry | None = None, path: str = "") -> Iterator[tuple[str, Any, Any, str]]:
    """Yield every setting of a :class:`RunConfig` or a section as (path, value, default, help).

    With ``registry``, the settings of the plugins are included.
    """
    for field in attrs.fields(type(settings)):
        value, inner = getattr(settings, field.name), f"{path}.{field.name}".lstrip(".")
        help, default = field.metadata.get("help", ""), field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory(settings) if default.takes_self else default.factory()
        if isinstance(value, PluginSection):
            yield f"{inner}.name", value.name, default.name, help
            if registry is None:
                continue
            value = structure(registry.resolve(value.name, inner).settings_class, value.settings, inner)
        if attrs.has(type(value)):
            yield from explain(value, registry, inner)
        else:
            yield inner, value, "(required)" if default is attrs.NOTHING else default, help
