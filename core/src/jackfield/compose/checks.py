"""Checks of a run's settings and plugins before it starts."""

from __future__ import annotations

import difflib
import functools
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc import KINDS
from jackfield.algorithms import register_part
from jackfield.config import RunConfig, validate_plugins
from jackfield.errors import ConfigError, PluginError, PluginNotFound
from jackfield.plugins import HookManager, Registry, require_capability
from jackfield.plugins.interpreters import environment_python, look, resolve_interpreter
from jackfield.queue import register_sampler
from jackfield.trainer import RoleName

HEAVY = ("engine", "rollout")  #: kinds whose plugins import torch, which are imported last
_PROBE_SECONDS = 30.0


def refusal(config: RunConfig, where: str, message: str, expected: str, code: str | None = None) -> ConfigError:
    """Return the error for the setting at the path ``where``. It shows the setting's value."""
    found = functools.reduce(getattr, where.split("."), config)
    shown = None if attrs.has(type(found)) else found
    return ConfigError(message, code=code, where=where, expected=expected, found=shown)


def address_file(config: RunConfig) -> Path:
    """Return the file in which a served controller publishes its address."""
    return Path(config.queue.address or Path(config.folder) / "queue" / "address.json")


def with_address(config: RunConfig) -> RunConfig:
    """Return the configuration of a process whose queue controller runs elsewhere."""
    return attrs.evolve(config, queue=attrs.evolve(config.queue, address=str(address_file(config).absolute())))


def role_config(config: RunConfig, role: RoleName) -> RunConfig:
    """Return the configuration of a role, with the controller's address and its own folder.

    Raises:
        ConfigError: If roles cannot share the run, or must share it.
    """
    shared, distributed = role != "all", config.queue.rewards == "distributed"
    if distributed and not shared:
        what = "in a run in one process, that process scores the samples"
        raise refusal(config, "queue.rewards", what, "train, or each role launched with --role")
    if shared and config.mode != "online":
        raise refusal(config, "mode", "there are roles where samples are explored", "online")
    if shared and config.weights.kind != "full":
        raise refusal(config, "weights.kind", "explorers that come and go get whole weights", "full")
    if role == "reward" and not distributed:
        what = "the role train scores the samples of this run, unless all roles have the setting"
        raise refusal(config, "queue.rewards", what, "distributed")
    name = f"explorer-{socket.gethostname()}-{os.getpid()}" if role == "explore" else "rewards"
    folder = Path(config.folder, "explorers", name) if role == "explore" else Path(config.folder, name)
    config = with_address(config) if shared else config
    return attrs.evolve(config, name=name, folder=str(folder)) if role in ("explore", "reward") else config


def chosen(config: RunConfig) -> list[tuple[str, str]]:
    """Return kind and name of each plugin of a run."""
    return [(kind, getattr(config, kind).name) for kind in KINDS]


def check_plugins(config: RunConfig, registry: Registry, role: RoleName = "all") -> None:
    """Check plugins' manifests, settings and capabilities; import config modules only.

    Raises:
        PluginError: If a plugin is missing, broken, of another ABI, or cannot do what the run needs.
        ConfigError: If a plugin's settings are wrong.
    """
    for kind, name in chosen(config):
        try:
            registry.find(kind, name)
        except PluginNotFound as error:
            _add_failures(error, registry, kind, name)
            raise
    validate_plugins(config, registry)
    own, seconds = interpreters(config, registry), min(config.deadlines.start, _PROBE_SECONDS)
    for kind, name in chosen(config):
        if kind in own:
            look(own[kind], registry.resolve(name, kind), seconds).check()
    check_capabilities(config, registry, role)


def check_capabilities(config: RunConfig, registry: Registry, role: RoleName = "all") -> None:
    """Check that plugins declare the capabilities that the settings need.

    Raises:
        PluginError: ``plugin.capability`` if a plugin does not declare one.
        ConfigError: If a setting does not work with an adapter, or with a cluster, whose queue's controller runs in
            the storage worker.
    """
    served, lora, weights = config.queue.address is not None, config.model.lora is not None, config.weights
    float8, delta = weights.dtype == "float8_e4m3fn", weights.kind == "delta"
    alone = "a run that trains an adapter sends the adapter alone, as it is"
    if lora and float8:
        raise refusal(config, "weights.dtype", alone, "bfloat16, or no model.lora")
    if lora and delta:
        raise refusal(config, "weights.kind", alone, "full, or no model.lora")
    for needed, kind, capability, because in (
        (config.queue.durable, "transfer_queue", "durable", "queue.durable is set"),
        (served, "transfer_queue", "joins", "the queue's controller is in a process of its own"),
        (config.model.dropout, "engine", "dropout", "model.dropout is set"),
        (lora, "engine", "lora", "model.lora is set"),
        (lora, "rollout", "weights_adapter", "model.lora is set"),
        (float8, "rollout", "weights_float8", "weights.dtype is float8_e4m3fn"),
        (delta, "checkpoint_engine", "delta", "weights.kind is delta"),
        (delta, "rollout", "weights_delta", "weights.kind is delta"),
        (role != "all", "checkpoint_engine", "retains_weights", "explorers come and go (--role)"),
    ):
        if needed:
            require_capability(registry.find(kind, getattr(config, kind).name), capability, because)
    if served and config.cluster.name != "inline":
        what = "a controller in a process of its own serves runs whose workers are in their own process"
        raise refusal(config, "cluster.name", what, "inline, or no queue.address")


def hooks_of(config: RunConfig, registry: Registry, hooks: Sequence[object] = ()) -> HookManager:
    """Collect the hooks of the run's plugins, and let plugins register components.

    Samplers are registered with the queue, all other components with the algorithms.
    """
    manager = HookManager(hooks, [registry.find(kind, name) for kind, name in chosen(config)])

    def register(kind: str, name: str, part: Any) -> None:
        if kind == "sampler":
            register_sampler(name, part)
        else:
            register_part(kind, name, part)

    manager.hook.register_parts(register=register)
    return manager


def import_plugins(config: RunConfig, registry: Registry, *, heavy: bool) -> None:
    """Import and check plugins: those that import torch (``heavy``), or the others.

    Raises:
        PluginError: If a plugin of this interpreter cannot be imported or its class does not fit its contract.
    """
    elsewhere = interpreters(config, registry)
    for kind, name in chosen(config):
        if (kind in HEAVY) == heavy and kind not in elsewhere:
            registry.load(kind, name)


def interpreters(config: RunConfig, registry: Registry) -> dict[str, str]:
    """Return the interpreters of kinds of workers that do not use this one; start none.

    The configuration has precedence over manifests.

    Raises:
        PluginError: ``plugin.interpreter`` if there is no such program, or this kind of worker cannot have one.
    """
    found = {}
    for kind, name in chosen(config):
        wanted, where = config.cluster.interpreters.get(kind), f"cluster.interpreters.{kind}"
        if wanted is None:
            manifest = registry.find(kind, name)
            wanted, where = manifest.env.python, f"the manifest of the {manifest.label}, [env] python"
        elif wanted in config.environments:
            python = environment_python(config.environments[wanted].path(wanted))
            if not Path(python).exists():
                what, fix = f"the environment '{wanted}' has not been made", f"jackfield env create {wanted} FILE"
                raise _no_interpreter(what, where, python, "no such file", fix)
            wanted = python
        path = os.path.abspath(resolve_interpreter(wanted, where))
        if path == os.path.abspath(sys.executable):
            continue
        if config.cluster.name == "inline" and kind != "rollout":
            what = f"a worker of the kind '{kind}' cannot have a process of its own with the cluster 'inline'"
            fix = "use cluster.name: ray, or give the rollout server the interpreter of its own"
            raise _no_interpreter(what, where, f"{sys.executable}; or an interpreter for rollout", path, fix)
        found[kind] = path
    return found


def _no_interpreter(what: str, where: str, expected: str, found: str, fix: str) -> PluginError:
    return PluginError(what, code="plugin.interpreter", where=where, expected=expected, found=found, fix=fix)


def _add_failures(error: PluginNotFound, registry: Registry, kind: str, name: str) -> None:
    """Add the import errors of the installed plugins of this kind to an error.

    If the name looks misspelt, plugins that import torch are skipped, because that takes long.
    """
    usable = [record for record in registry.records(kind) if record.error is None]
    if kind in HEAVY and difflib.get_close_matches(name, [record.name for record in usable]):
        return
    for record in usable:
        found = look(record.usable().env.python, record, _PROBE_SECONDS, importing=True)
        for problem in filter(None, (found.problem, *found.problems)):
            error.found = f"{error.found}; {record.name} cannot be used: {problem.message}: {problem.found}"
