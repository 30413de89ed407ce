"""Gate 3: what the process where a plugin really runs says of itself, before the plugin is imported there.

``python -m jackfield.plugins.handshake KIND NAME`` prints it as one line of JSON; a process that will hold the plugin
says the same as its first words.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Mapping
from typing import Any

import jackfield
from jackfield.abc import ABI_VERSIONS
from jackfield.errors import CODES, JackfieldError, PluginError
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.interpreters import preflight, run_child
from jackfield.plugins.registry import discover

__all__ = ["check_interpreter", "check_introduction", "introduce"]

_PACKAGES = ("torch", "transformers")


def introduce(kind: str, name: str) -> dict[str, Any]:
    """What this process is, and which plugin it would load; imports none. JSON-ready.

    A plugin that gate 1 refuses here is told as ``problem``.
    """
    found: dict[str, Any] = {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "jackfield": jackfield.__version__,
        "abi": ABI_VERSIONS.get(kind),
        "versions": {package: _version(package) for package in _PACKAGES},
    }
    try:
        record = discover().resolve(name, kind)
        if record.error is not None:
            raise record.error
    except JackfieldError as error:
        return {**found, "problem": error.as_dict()}
    manifest = record.manifest
    assert manifest is not None, "a record that is not broken has a manifest"
    plugin = {"distribution": record.distribution, "version": record.version, "abi": manifest.abi}
    return {**found, "plugin": {**plugin, "capabilities": dict(manifest.capabilities)}}


def check_introduction(record: PluginRecord, found: Mapping[str, Any], python: str) -> None:
    """Refuse a process that would not do what this one expects of the plugin.

    Jackfield and the plugin are the same versions on both sides: settings are checked here and used there, and what
    the manifest declares here has to hold there.

    Args:
        record: of the plugin, as it is installed here.
        found: what the other process said, see :func:`introduce`.
        python: its interpreter.

    Raises:
        PluginError: ``plugin.handshake``, or what gate 1 says there.
    """
    if "problem" in found:
        raise _told(found["problem"], python)
    manifest = record.manifest
    assert manifest is not None, "a plugin that is chosen has a manifest"
    plugin = {"distribution": record.distribution, "version": record.version, "abi": manifest.abi}
    ours = {
        "jackfield": jackfield.__version__,
        "abi": ABI_VERSIONS[record.kind],
        "plugin": {**plugin, "capabilities": dict(manifest.capabilities)},
    }
    different = [name for name in ours if found.get(name) != ours[name]]
    if not different:
        return
    wanted = [f"jackfield=={jackfield.__version__}", f"{record.distribution}=={record.version}"]
    raise PluginError(
        f"the interpreter {python} has another {' and '.join(different)} than this one",
        code="plugin.handshake",
        where=record.label,
        expected={name: ours[name] for name in different},
        found={name: found.get(name) for name in different},
        fix=f"{python} -m pip install {' '.join(wanted)}, or the same versions here",
    )


def check_interpreter(record: PluginRecord, python: str, deadline: float = 30.0) -> None:
    """Look, in seconds, whether an interpreter is there, starts, and has this plugin as it is installed here.

    Raises:
        PluginError: ``plugin.interpreter``, ``plugin.requirement`` or as :func:`check_introduction`.
    """
    report = preflight(python, deadline)
    if report.problem is not None:
        raise report.problem
    result = run_child(report.path, ["-m", "jackfield.plugins.handshake", record.kind, record.name], deadline)
    lines = result.stdout.strip().splitlines()
    try:
        found = json.loads(lines[-1]) if lines and result.returncode == 0 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise PluginError(
            f"the interpreter {report.path} does not say what it would run",
            code="plugin.interpreter",
            where=record.label,
            expected=f"an installation of jackfield {jackfield.__version__}",
            found=f"jackfield {report.versions.get('jackfield')}; {result.ending}, {result.last_words}",
            fix=f"{report.path} -m pip install jackfield=={jackfield.__version__}",
        )
    check_introduction(record, found, report.path)


def _told(fields: Mapping[str, Any], python: str) -> PluginError:
    """An error of the other process, which may have codes that this one does not know."""
    code = fields["code"] if fields["code"] in CODES else "plugin.handshake"
    fix = fields.get("fix") or "install the plugin there"
    return PluginError(
        f"the interpreter {python} refuses the plugin: {fields['message']}",
        code=code,
        where=fields.get("where"),
        expected=fields.get("expected"),
        found=fields.get("found"),
        fix=f"in {python}: {fix}",
    )


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    print(json.dumps(introduce(*sys.argv[1:])))
