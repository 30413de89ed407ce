"""The plugins that a configuration selects: found, checked, imported."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jackfield.algorithms import register_part
from jackfield.config import PluginSection, RunConfig, plugin_sections, validate_plugins
from jackfield.errors import ConfigError, PluginError, PluginNotFound
from jackfield.plugins import Manifest, PluginRecord, Registry, require_capability
from jackfield.plugins.interpreters import environment_python, resolve_interpreter
from jackfield.plugins.introduction import look
from jackfield.queue import register_sampler

#: Kinds whose plugins import torch: they come last.
HEAVY = ("engine", "rollout")
PROCESS_KINDS = ("rollout",)  #: can have a process of their own with the cluster ``inline``
_PROBE_SECONDS = 30.0


def check_plugins(config: RunConfig, registry: Registry) -> None:
    """The manifest check, settings, interpreters and capabilities; imports config modules only.

    Raises:
        PluginError: a plugin is not there, broken, of another ABI, or cannot do what the run needs.
        ConfigError: a plugin's settings are wrong.
    """
    for kind, name in _chosen(config):
        try:
            registry.find(kind, name)
        except PluginNotFound as error:
            raise _with_failures(error, registry, kind, name) from None
    validate_plugins(config, registry)
    _check_interpreters(config, registry)
    if config.queue.durable:
        require_capability(
            registry.find("transfer_queue", config.transfer_queue.name), "durable", "queue.durable is set"
        )
    if config.queue.address is not None:
        check_distributed(config, registry, "queue.address is set")
    if config.model.dropout > 0.0:
        require_capability(registry.find("engine", config.engine.name), "dropout", "model.dropout is set")
    if config.model.lora is not None:
        require_capability(registry.find("engine", config.engine.name), "lora", "model.lora is set")
        require_capability(registry.find("rollout", config.rollout.name), "weights_adapter", "model.lora is set")
    check_weights(config, registry)


def check_weights(config: RunConfig, registry: Registry) -> None:
    """Check what the section ``weights`` asks of plugins.

    Raises:
        PluginError: a plugin has not declared it.
        ConfigError: it does not go together with an adapter.
    """
    rollout = registry.find("rollout", config.rollout.name)
    if config.weights.dtype == "float8_e4m3fn":
        _refuse_with_adapter(config, "weights.dtype", "bfloat16")
        require_capability(rollout, "weights_float8", "weights.dtype is float8_e4m3fn")
    if config.weights.kind == "delta":
        because = "weights.kind is delta"
        _refuse_with_adapter(config, "weights.kind", "full")
        require_capability(registry.find("checkpoint_engine", config.checkpoint_engine.name), "delta", because)
        require_capability(rollout, "weights_delta", because)


def _refuse_with_adapter(config: RunConfig, where: str, expected: str) -> None:
    if config.model.lora is not None:
        section, key = where.split(".")
        raise ConfigError(
            "a run that trains an adapter sends the adapter alone, as it is",
            where=where,
            expected=f"{expected}, or no model.lora",
            found=getattr(getattr(config, section), key),
        )


def check_distributed(config: RunConfig, registry: Registry, because: str) -> None:
    """See that a queue's controller may be in another process than this one.

    Raises:
        PluginError: ``plugin.capability``: the backend keeps values in one process.
        ConfigError: workers are in a cluster, whose storage worker has the controller beside it.
    """
    require_capability(registry.find("transfer_queue", config.transfer_queue.name), "joins", because)
    if config.cluster.name != "inline":
        raise ConfigError(
            "a controller in a process of its own serves runs whose workers are in their own process",
            where="cluster.name",
            expected="inline",
            found=config.cluster.name,
            fix=f"use cluster.name: inline, because {because}",
        )


def register_parts(hooks: Any) -> None:
    """Have plugins offer small parts: samplers are the queue's, all others the algorithms'."""

    def register(kind: str, name: str, part: Any) -> None:
        if kind == "sampler":
            register_sampler(name, part)
        else:
            register_part(kind, name, part)

    hooks.register_parts(register=register)


def import_plugins(config: RunConfig, registry: Registry, *, heavy: bool) -> None:
    """The structure check, for plugins that import torch or for the others; those that run elsewhere are checked there.

    Raises:
        PluginError: a plugin cannot be imported, or its class does not fit its contract.
    """
    elsewhere = interpreters(config, registry)
    for kind, name in _chosen(config):
        if (kind in HEAVY) == heavy and kind not in elsewhere:
            registry.load(kind, name)


def records_of(config: RunConfig, registry: Registry) -> list[PluginRecord]:
    """The plugins of a run, usable or not.

    Raises:
        PluginNotFound: one is not installed here.
    """
    return [registry.resolve(name, kind) for kind, name in _chosen(config)]


def manifests(config: RunConfig, registry: Registry) -> Sequence[Manifest]:
    """Return the manifests of a run's plugins."""
    return [registry.find(kind, name) for kind, name in _chosen(config)]


def _chosen(config: RunConfig) -> Iterator[tuple[str, str]]:
    for section, kind in plugin_sections().items():
        chosen: PluginSection = getattr(config, section)
        yield kind, chosen.name


def interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """The paths of interpreters that kinds of workers have for themselves; nothing is started.

    What the configuration says comes before what a manifest says.

    Raises:
        PluginError: ``plugin.interpreter``: there is no such program, or not for this kind of worker.
    """
    found = {}
    for kind, name in _chosen(config):
        wanted, where = config.cluster.interpreters.get(kind), f"cluster.interpreters.{kind}"
        if wanted in config.environments:
            wanted = _python_of(config, str(wanted), where)
        if wanted is None:
            manifest = registry.find(kind, name)
            wanted, where = manifest.env.python, f"the manifest of the {manifest.label}, [env] python"
        if wanted is None:
            continue
        path = resolve_interpreter(wanted, where)
        if path == os.path.abspath(sys.executable):
            continue
        if config.cluster.name == "inline" and kind not in PROCESS_KINDS:
            raise PluginError(
                f"a worker of the kind '{kind}' cannot have a process of its own with the cluster 'inline'",
                code="plugin.interpreter",
                where=where,
                expected=f"{sys.executable}; or an interpreter for {', '.join(PROCESS_KINDS)}",
                found=path,
                fix="use cluster.name: ray, or give the rollout server the interpreter of its own",
            )
        found[kind] = path
    return found


def _python_of(config: RunConfig, name: str, where: str) -> str:
    python = environment_python(config.environments[name].path(name))
    if not Path(python).exists():
        raise PluginError(
            f"the environment '{name}' has not been made",
            code="plugin.interpreter",
            where=where,
            expected=python,
            found="no such file",
            fix=f"jackfield env create {name} FILE, with the file of this configuration",
        )
    return python


def _check_interpreters(config: RunConfig, registry: Registry) -> None:
    """See in seconds that each is there and has the plugin that is to run in it."""
    seconds = min(config.deadlines.start, _PROBE_SECONDS)
    for kind, python in interpreters(config, registry).items():
        look(python, registry.resolve(getattr(config, kind).name, kind), seconds).check()


def _with_failures(error: PluginNotFound, registry: Registry, kind: str, name: str) -> PluginNotFound:
    """The same error, with what the installed plugins of this kind say when they are imported.

    Importing torch to answer a slip of the pen would take longer than to correct it.
    """
    usable = [record for record in registry.records(kind) if record.error is None]
    if kind in HEAVY and difflib.get_close_matches(name, [record.name for record in usable]):
        return error
    failures = [
        f"{record.name} cannot be used: {problem.message}: {problem.found}"
        for record in usable
        for problem in _failures(record)
    ]
    found = "; ".join([str(error.found), *failures])
    return PluginNotFound(error.message, where=error.where, expected=error.expected, found=found, fix=error.fix)


def _failures(record: PluginRecord) -> Iterator[PluginError]:
    found = look(record.usable().env.python, record, _PROBE_SECONDS, importing=True)
    yield from filter(None, (found.problem, *found.missing, *found.problems))
