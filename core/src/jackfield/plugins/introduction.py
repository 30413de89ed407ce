"""Ask an interpreter for its versions, the plugin that it would run, and what it lacks.

:func:`look` asks an interpreter in one child process. A process that will hold a plugin says the same as its first
words, see :func:`introduce`, before the plugin is imported there.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
from packaging.requirements import Requirement

import jackfield
from jackfield.abc import ABI_VERSIONS
from jackfield.errors import CODES, JackfieldError, PluginError, PluginImportError
from jackfield.plugins.discovery import PluginRecord
from jackfield.plugins.hook_manager import hook_manager
from jackfield.plugins.interpreters import ChildResult, resolve_interpreter, run_child
from jackfield.plugins.manifest import Manifest
from jackfield.plugins.registry import discover, import_object
from jackfield.plugins.structure import check_settings_class, structure_problems

#: Runs on any Python 3, with nothing installed.
_PROGRAM = """
import json, sys
try:
    from importlib.metadata import version
    from importlib.util import find_spec
except ImportError:
    version = find_spec = None
def look_up(name):
    try:
        return version(name) if find_spec(name) else None
    except Exception:
        return None
names = ("jackfield", "torch", "ray")
print(json.dumps({"python": sys.version.split()[0], "versions": {name: look_up(name) for name in names}}))
sys.stdout.flush()
if sys.argv[1:]:
    from jackfield.plugins.introduction import main
    main(*sys.argv[1:])
"""
_OLDEST_PYTHON = (3, 11)
_UNKNOWN: Mapping[str, str | None] = {"jackfield": None, "torch": None, "ray": None}
#: Packages that a settings module must not load: a process that reads a configuration may have none of them.
_HEAVY = ("torch", "ray")


@attrs.frozen(kw_only=True)
class Introduction:
    """An interpreter and a plugin in it, as one child process found them."""

    path: str
    python: str | None = None  #: the interpreter's version; None: it did not say
    versions: Mapping[str, str | None] = _UNKNOWN  #: of jackfield, torch and ray; None: not installed
    seconds: float = 0.0
    problem: PluginError | None = None  #: of the interpreter; the plugin was not looked at then
    problems: tuple[PluginError, ...] = ()  #: of the plugin there
    missing: tuple[PluginError, ...] = ()  #: requirements of the plugin that are not installed there

    def check(self) -> None:
        """Raise the first thing that keeps the plugin from running there.

        Raises:
            PluginError: ``plugin.interpreter``, ``plugin.handshake``, ``plugin.requirement``, or what the plugin's
                manifest or import raises there.
        """
        for problem in (self.problem, *self.problems, *self.missing):
            if problem is not None:
                raise problem


def look(
    python: str | None, record: PluginRecord | None = None, seconds: float = 30.0, *, importing: bool = False
) -> Introduction:
    """Ask an interpreter for its introduction, in one child process with a deadline.

    Args:
        python: As :func:`~jackfield.plugins.interpreters.resolve_interpreter`.
        record: The plugin that is to run there, as it is installed here; None: only the interpreter counts.
        seconds: The deadline.
        importing: Import the plugin there, too, and check its structure and its hooks.
    """
    plugin = [] if record is None else [record.kind, record.name, *(["importing"] if importing else [])]
    path = python or ""
    try:
        path = resolve_interpreter(python)
        result = run_child(path, ["-c", _PROGRAM, *plugin], seconds)
    except PluginError as error:
        return Introduction(path=path, problem=error)
    except OSError as error:
        return Introduction(path=path, problem=_unusable(path, "cannot be started", f"{type(error).__name__}: {error}"))
    said = _said(result.stdout)
    if "python" not in said:
        what = "did not answer in time" if result.returncode is None else "does not work"
        return Introduction(path=path, seconds=result.seconds, problem=_unusable(path, what, result.ending))
    found = Introduction(path=path, python=said["python"], versions=said["versions"], seconds=result.seconds)
    unfit = _unfit(path, said)
    if unfit is not None or record is None:
        return attrs.evolve(found, problem=unfit)
    return attrs.evolve(
        found,
        problems=tuple(_problems(record, path, said, result)),
        missing=tuple(_rebuilt(fields, path) for fields in said.get("introduction", {}).get("missing", ())),
    )


def _problems(record: PluginRecord, path: str, said: Mapping[str, Any], result: ChildResult) -> Iterator[PluginError]:
    if "introduction" not in said:
        release = f"jackfield=={jackfield.__version__}"
        found = f"jackfield {said['versions'].get('jackfield')}; {result.ending}"
        yield _unusable(path, "does not say what it would run", found, release, f"{path} -m pip install {release}")
        return
    try:
        _check_same(record, said["introduction"], path)
    except PluginError as error:
        yield error
        return
    if "problems" in said:
        yield from (_rebuilt(fields, path) for fields in said["problems"])
        return
    late = result.returncode is None
    yield PluginImportError(
        f"{said['stage']} did not end in time" if late else f"{said['stage']} ended the interpreter",
        where=record.label,
        expected="an import that ends, and leaves the interpreter alive",
        found=result.ending,
        fix="correct the plugin's module" + ("; raise --deadline if it is only slow" if late else ""),
    )


def check_introduction(record: PluginRecord, said: Mapping[str, Any], python: str) -> None:
    """Refuse a process that would not do what this one expects of the plugin.

    Jackfield and the plugin are the same versions on both sides: settings are checked here and used there, and what
    the manifest declares here has to hold there.

    Args:
        record: The plugin, as it is installed here.
        said: The introduction of the other process, see :func:`introduce`.
        python: Its interpreter.

    Raises:
        PluginError: ``plugin.handshake``, ``plugin.requirement``, or what the manifest's check raised there.
    """
    _check_same(record, said, python)
    for fields in said.get("missing", ()):
        raise _rebuilt(fields, python)


def _check_same(record: PluginRecord, said: Mapping[str, Any], python: str) -> None:
    if "problem" in said:
        raise _rebuilt(said["problem"], python)
    wanted = {"jackfield": jackfield.__version__, "abi": ABI_VERSIONS[record.kind], "plugin": _identity(record)}
    different = [name for name in wanted if said.get(name) != wanted[name]]
    if different:
        releases = f"jackfield=={jackfield.__version__} {record.distribution}=={record.version}"
        raise PluginError(
            f"the interpreter {python} has another {' and '.join(different)} than this one",
            code="plugin.handshake",
            where=record.label,
            expected={name: wanted[name] for name in different},
            found={name: said.get(name) for name in different},
            fix=f"{python} -m pip install {releases}, or the same versions here",
        )


def introduce(kind: str, name: str) -> dict[str, Any]:
    """Say what this process is, and which plugin it would load; JSON-ready. Imports no plugin.

    A plugin that the check of its manifest refuses is there as ``problem``.
    """
    found = {
        "pid": os.getpid(),
        "python": platform.python_version(),
        "jackfield": jackfield.__version__,
        "abi": ABI_VERSIONS.get(kind),
    }
    try:
        record = discover().resolve(name, kind)
        missing = [error.as_dict() for error in _missing(record.usable(), record.label)]
    except JackfieldError as error:
        return {**found, "problem": error.as_dict()}
    return {**found, "plugin": _identity(record), "missing": missing}


def main(kind: str, name: str, *importing: str) -> None:
    """Answer :func:`look` in JSON lines, and end this process; threads of the plugin cannot delay the end.

    Each stage that may hang or crash is named before it begins. What the plugin itself prints goes to stderr.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        lines.write(json.dumps(fields) + "\n")
        lines.flush()

    problems: list[JackfieldError] = []
    said = introduce(kind, name)
    say(introduction=said)
    try:
        for stage, problem in _try(kind, name) if importing and said.get("missing") == [] else ():
            say(stage=stage)
            problems += [] if problem is None else [problem]
    except JackfieldError as error:
        problems.append(error)
    say(problems=[problem.as_dict() for problem in problems])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _try(kind: str, name: str) -> Iterator[tuple[str, JackfieldError | None]]:
    """Import a plugin: stages, each before it is entered, and what is wrong."""
    record = discover().resolve(name, kind)
    manifest, where = record.usable(), record.label
    stage = f"importing {manifest.config.partition(':')[0]}"
    yield stage, None
    check_settings_class(import_object(manifest.config, manifest, where), where)
    loaded = " and ".join(name for name in _HEAVY if name in sys.modules)
    if loaded:
        yield (
            stage,
            PluginError(
                f"importing the config {manifest.config} loads {loaded}",
                code="plugin.config-class",
                where=where,
                expected="a config module that can be imported without them",
                found=f"{loaded} in sys.modules",
                fix="move the config class to a module, in a package, that imports nothing heavy",
            ),
        )
    stage = f"importing {manifest.object.partition(':')[0]}"
    yield stage, None
    cls = import_object(manifest.object, manifest, where)
    for problem in structure_problems(kind, cls, where):
        yield stage, problem
    if manifest.hooks is not None:
        yield f"importing {manifest.hooks}", None
        hook_manager((), [manifest])


def _missing(manifest: Manifest, where: str) -> Iterator[PluginError]:
    """Find the requirements of ``[env]`` that this interpreter does not meet; nothing is imported.

    Versions are read from metadata, and extras are followed one level down.
    """
    for text in manifest.env.requires:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate():
            yield from _unmet(requirement, where)
    for module in manifest.env.modules:
        if importlib.util.find_spec(module) is None:
            fix = f"install it, or give the plugin an environment that has it: cluster.interpreters.{manifest.kind}"
            yield _requirement_error(f"the module {module}", "not there", where, fix)


def _unmet(requirement: Requirement, where: str) -> Iterator[PluginError]:
    fix = f"{sys.executable} -m pip install '{str(requirement).partition(';')[0].strip()}'"
    try:
        distribution = importlib.metadata.distribution(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        yield _requirement_error(str(requirement), "not installed", where, fix)
        return
    if not requirement.specifier.contains(distribution.version, prereleases=True):
        yield _requirement_error(str(requirement), f"{requirement.name} {distribution.version}", where, fix)
    for text in distribution.requires or ():
        inner = Requirement(text)
        if inner.marker is None or inner.marker.evaluate({"extra": ""}):
            continue  # required without an extra
        if any(inner.marker.evaluate({"extra": extra}) for extra in requirement.extras):
            yield from _unmet(Requirement(text.partition(";")[0]), where)


def _requirement_error(needed: str, found: str, where: str, fix: str) -> PluginError:
    found = f"{found} in {sys.executable}"
    return PluginError(f"the plugin needs {needed}", where=where, expected=needed, found=found, fix=fix)


def _identity(record: PluginRecord) -> dict[str, Any]:
    manifest = record.usable()
    plugin = {"distribution": record.distribution, "version": record.version, "abi": manifest.abi}
    return {**plugin, "capabilities": dict(manifest.capabilities)}


def _rebuilt(fields: Mapping[str, Any], python: str) -> PluginError:
    """An error of another interpreter, whose Jackfield may have codes that this one does not know."""
    code = fields["code"] if fields["code"] in CODES else "plugin.handshake"
    message, fix = fields["message"], fields.get("fix") or "install the plugin there"
    if os.path.abspath(python) != os.path.abspath(sys.executable):
        message, fix = f"the interpreter {python} refuses the plugin: {message}", f"in {python}: {fix}"
    details = {name: fields.get(name) for name in ("where", "expected", "found")}
    return PluginError(message, code=code, fix=fix, **details)


def _unusable(
    path: str,
    what: str,
    found: str,
    expected: str = "an interpreter that starts and prints its version",
    fix: str = "run it by hand to see why, or make its environment again",
    code: str = "plugin.interpreter",
) -> PluginError:
    message = f"the interpreter {path} {what}"
    return PluginError(message, code=code, where=path, expected=expected, found=found, fix=fix)


def _unfit(path: str, said: Mapping[str, Any]) -> PluginError | None:
    found = f"Python {said['python']}, jackfield {said['versions']['jackfield'] or '-'}"
    if tuple(int(part) for part in said["python"].split(".")[:2]) < _OLDEST_PYTHON:
        expected = "Python {}.{} or later".format(*_OLDEST_PYTHON)
        return _unusable(path, "is too old", found, expected, "make the environment with a newer Python")
    if said["versions"]["jackfield"] is None:
        fix = f"{path} -m pip install jackfield"
        return _unusable(path, "has no jackfield", found, "jackfield", fix, "plugin.requirement")
    return None


def _said(text: str) -> dict[str, Any]:
    """What a child has said: its JSON lines in one. Start-up files may print other lines."""
    said: dict[str, Any] = {}
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        said |= fields if isinstance(fields, dict) else {}
    return said
