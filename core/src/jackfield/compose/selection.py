"""The plugins that a configuration selects: found, checked, imported."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator, Sequence

from jackfield.config import PluginSection, RunConfig, plugin_sections, validate_plugins
from jackfield.errors import PluginError, PluginNotFound
from jackfield.plugins import Manifest, Registry, require_capability
from jackfield.plugins.doctor import PluginReport, examine
from jackfield.plugins.interpreters import resolve_interpreter

__all__ = ["check_plugins", "import_plugins", "manifests"]

#: Kinds whose plugins import torch: they come last.
HEAVY = ("engine", "rollout")
_PROBE_SECONDS = 30.0


def check_plugins(config: RunConfig, registry: Registry) -> None:
    """Gate 1, settings, interpreters and capabilities; imports config modules only.

    Raises:
        PluginError: a plugin is not there, broken, of another ABI, or cannot do what the run needs.
        ConfigError: a plugin's settings are wrong.
    """
    for kind, name in _chosen(config):
        try:
            manifest = registry.find(kind, name)
        except PluginNotFound as error:
            raise _with_failures(error, registry, kind, name) from None
        if config.runtime.name == "inline":
            _check_interpreter(manifest)
    validate_plugins(config, registry)
    if config.model.lora is not None:
        require_capability(registry.find("engine", config.engine.name), "lora", "model.lora is set")
        require_capability(registry.find("rollout", config.rollout.name), "weights_adapter", "model.lora is set")


def import_plugins(config: RunConfig, registry: Registry, *, heavy: bool) -> None:
    """Gate 2, for the plugins that import torch or for the others.

    Raises:
        PluginError: a plugin cannot be imported, or its class does not fit its contract.
    """
    for kind, name in _chosen(config):
        if (kind in HEAVY) == heavy:
            registry.load(kind, name)


def manifests(config: RunConfig, registry: Registry) -> Sequence[Manifest]:
    """Of the plugins of a run."""
    return [registry.find(kind, name) for kind, name in _chosen(config)]


def _chosen(config: RunConfig) -> Iterator[tuple[str, str]]:
    for section, kind in plugin_sections().items():
        chosen: PluginSection = getattr(config, section)
        yield kind, chosen.name


def _check_interpreter(manifest: Manifest) -> None:
    """The runtime ``inline`` has one process, and so one interpreter."""
    wanted = manifest.env.python
    if wanted is None:
        return
    path = resolve_interpreter(wanted, f"the manifest of the {manifest.label}, [env] python")
    if path != os.path.abspath(sys.executable):
        raise PluginError(
            f"the {manifest.label} asks for an interpreter of its own, and the runtime 'inline' has one for all",
            code="plugin.interpreter",
            where=f"the manifest of the {manifest.label}, [env] python",
            expected=sys.executable,
            found=path,
            fix=f"run jackfield with {path}, or install the plugin without [env] python in its manifest",
        )


def _with_failures(error: PluginNotFound, registry: Registry, kind: str, name: str) -> PluginNotFound:
    """The same error, with what the installed plugins of this kind say when they are imported.

    Importing torch to answer a slip of the pen would take longer than to correct it.
    """
    usable = [record for record in registry.records(kind) if record.error is None]
    if kind in HEAVY and difflib.get_close_matches(name, [record.name for record in usable]):
        return error
    failures = [
        f"{report.record.name} cannot be used: {problem.message}: {problem.found}"
        for report in examine(usable, _PROBE_SECONDS)
        if isinstance(report, PluginReport)
        for problem in report.problems
    ]
    found = "; ".join([str(error.found), *failures])
    return PluginNotFound(error.message, where=error.where, expected=error.expected, found=found, fix=error.fix)
