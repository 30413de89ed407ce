"""The child of ``jackfield plugins doctor``: tries one plugin and tells how far it came.

``python -m jackfield.plugins.probe KIND NAME`` writes JSON lines to stdout: ``{"stage": ...}`` before whatever may hang
or crash, and at the end ``{"problems": [...], "requires": ...}``. What the plugin itself prints goes to stderr.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from packaging.requirements import Requirement

from jackfield.errors import JackfieldError, PluginError, StructureError
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.hook_manager import hook_manager
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import Registry, discover, import_object
from jackfield.plugins.structure import structure_problems

__all__ = ["main", "missing_requirements"]

#: What a config module must not load: whoever reads a configuration may have none of it.
_HEAVY = ("torch", "ray")


def main(kind: str, name: str) -> None:
    """Probe one plugin and end this process; nothing that the plugin registered at exit can hold it up."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def tell(**fields: Any) -> None:
        lines.write(json.dumps(fields) + "\n")
        lines.flush()

    tell(stage="looking for installed plugins")
    problems: list[JackfieldError] = []
    try:
        registry = discover()
        manifest = registry.find(kind, name)
        for stage, problem in _problems(registry, manifest):
            tell(stage=stage)
            problems += [] if problem is None else [problem]
    except JackfieldError as error:
        problems.append(error)
    tell(problems=[problem.as_dict() for problem in problems])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _problems(registry: Registry, manifest: Manifest) -> Iterator[tuple[str, JackfieldError | None]]:
    """Stages, and what is wrong; a stage is announced before it is entered."""
    record = registry.resolve(manifest.name, manifest.kind)
    stage = "checking requirements"
    missing = list(missing_requirements(manifest, record.label))
    for problem in missing:
        yield stage, problem
    if missing:
        return  # an import would only say the same in other words
    stage = f"importing {manifest.config.partition(':')[0]}"
    yield stage, None
    registry.config_class(manifest.kind, manifest.name)
    yield stage, _heavy_config(manifest, record)
    stage = f"importing {manifest.object.partition(':')[0]}"
    yield stage, None
    cls = import_object(manifest.object, manifest, record.label)
    for structure_problem in structure_problems(manifest.kind, cls, record.label):
        yield stage, structure_problem
    if manifest.hooks is not None:
        yield f"importing {manifest.hooks}", None
        hook_manager((), [manifest])


def missing_requirements(manifest: Manifest, where: str) -> Iterator[PluginError]:
    """Requirements of ``[env]`` that this interpreter does not meet.

    Extras are followed one level down. Versions are read from metadata; modules are looked for; nothing is imported.

    Yields:
        ``plugin.requirement``.
    """
    for text in manifest.env.requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            yield from _unmet(requirement, where)
    for module in manifest.env.modules:
        if importlib.util.find_spec(module) is None:
            yield PluginError(
                f"the plugin needs the module {module}",
                where=where,
                expected=module,
                found=f"not there in {sys.executable}",
                fix=f"install it, or give the plugin an environment that has it: runtime.interpreters.{manifest.kind}",
            )


def _unmet(requirement: Requirement, where: str) -> Iterator[PluginError]:
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield _requirement_error(requirement, "not installed", where)
        return
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        yield _requirement_error(requirement, f"{requirement.name} {distribution.version}", where)
    for text in distribution.requires or ():
        inner = Requirement(text)
        if inner.marker is None or inner.marker.evaluate({"extra": ""}):
            continue  # not an extra's
        if any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield from _unmet(Requirement(text.partition(";")[0]), where)


def _requirement_error(requirement: Requirement, found: str, where: str) -> PluginError:
    bare = f"{requirement.name}{'[' + ','.join(sorted(requirement.extras)) + ']' if requirement.extras else ''}"
    return PluginError(
        f"the plugin needs {requirement}",
        where=where,
        expected=str(requirement),
        found=f"{found} in {sys.executable}",
        fix=f"{sys.executable} -m pip install '{bare}{requirement.specifier}'",
    )


def _heavy_config(manifest: Manifest, record: PluginRecord) -> StructureError | None:
    loaded = [name for name in _HEAVY if name in sys.modules]
    if not loaded:
        return None
    return StructureError(
        f"importing the config {manifest.config} loads {' and '.join(loaded)}",
        code="plugin.config-class",
        where=record.label,
        expected="a config module that can be imported without them",
        found=f"{', '.join(loaded)} in sys.modules",
        fix="move the config class to a module, in a package, that imports nothing heavy",
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
