"""Interpreters in which plugins run: find them, inspect them, and run them as children with a deadline.

:func:`look` asks an interpreter, in one child process, for its versions, the plugin that it would run and missing
requirements. A process that will load a plugin first reports the same (see :func:`introduce`), before it imports the
plugin. A child has its own process group, which is killed with it, so that a plugin that hangs or leaves processes
behind only costs its deadline.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import attrs

import jackfield
from jackfield.abc import ABI_VERSIONS
from jackfield.errors import JackfieldError, PluginError, PluginImportError, error_fields, rebuilt_error
from jackfield.plugins.hooks import HookManager
from jackfield.plugins.registry import PluginRecord, discover
from jackfield.plugins.structure import structure_problems

#: Code that runs on any Python 3 without installed packages.
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
    from jackfield.plugins.interpreters import main
    main(*sys.argv[1:])
"""
_OLDEST_PYTHON = (3, 11)
_UNKNOWN: Mapping[str, str | None] = {"jackfield": None, "torch": None, "ray": None}
#: Packages that a settings module must not import: a process that reads a configuration may not have them.
_HEAVY = ("torch", "ray")
_KEPT_BYTES = 1_000_000  #: bytes of a child's output


@attrs.frozen(kw_only=True)
class ChildResult:
    """The end of a child process and its output."""

    returncode: int | None  #: None: it was killed at the deadline; negative: the number of a signal
    stdout: str
    stderr: str
    seconds: float

    @property
    def ending(self) -> str:
        """A description of the end, with the last line of stderr."""
        words = [f"exit code {self.returncode}"]
        if self.returncode is None:
            words = [f"no end within {self.seconds:.1f} s"]
        elif self.returncode < 0:
            words = [f"killed by {signal.Signals(-self.returncode).name}"]
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return ", ".join([*words, *lines[-1:]])


@attrs.frozen(kw_only=True)
class Introduction:
    """A child process's report on an interpreter and a plugin in it."""

    path: str
    python: str | None = None  #: the interpreter's version; None: unknown
    versions: Mapping[str, str | None] = _UNKNOWN  #: versions of jackfield, torch and ray; None: not installed
    seconds: float = 0.0
    problem: PluginError | None = None  #: problem of the interpreter; the plugin is not inspected then
    problems: tuple[JackfieldError, ...] = ()  #: problems of the plugin there

    @property
    def missing(self) -> list[JackfieldError]:
        """The errors for requirements of the plugin that are not installed there."""
        return [problem for problem in self.problems if problem.code == "plugin.requirement"]

    def check(self, *, complete: bool = True) -> None:
        """Raise the first problem of the plugin there. Missing requirements count only if ``complete``.

        Raises:
            PluginError: ``plugin.interpreter``, ``plugin.handshake``, ``plugin.requirement``, or the error of the
                plugin's manifest or import there.
        """
        for problem in (self.problem, *self.problems):
            if problem is not None and (complete or problem not in self.missing):
                raise problem


def resolve_interpreter(python: str | None, where: str | None = None) -> str:
    """Return the absolute path of an interpreter.

    Args:
        python: A path (``~`` is expanded) or a command on ``PATH``; None: this interpreter.
        where: The setting that names it, for errors; None: the path itself.

    Raises:
        PluginError: ``plugin.interpreter`` if there is no such program.
    """
    if python is None:
        return sys.executable
    path = str(Path(python).expanduser())
    if program := shutil.which(path):
        return os.path.abspath(program)
    found = "a file that cannot be executed" if Path(path).exists() else "no such file"
    fix = "correct the path, or make the environment: python3 -m venv FOLDER, and install jackfield there"
    raise _unusable(python, "cannot be started", found, where=where or python, fix=fix)


def environment_python(folder: Path) -> str:
    """Return the path of an environment's interpreter."""
    return str(Path(folder).absolute() / "bin" / "python")


def environment_of(python: str) -> dict[str, str]:
    """Return this process's environment variables, for another interpreter without import settings."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the working directory is not on sys.path
    if os.path.abspath(python) != os.path.abspath(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__"):
            environment.pop(name, None)
    return environment


def run_child(python: str, arguments: Sequence[str], deadline: float) -> ChildResult:
    """Run an interpreter for at most ``deadline`` seconds. Raise a ``PluginError`` if it cannot be started."""
    started = time.monotonic()
    # files, not pipes: a grandchild that keeps a pipe open would delay the end
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": stderr}
        try:
            child = subprocess.Popen([python, *arguments], env=environment_of(python), start_new_session=True, **files)
        except OSError as error:
            raise _unusable(python, "cannot be started", f"{type(error).__name__}: {error}") from error
        returncode: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = child.wait(deadline)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()  # it was killed, so this returns
        seconds = time.monotonic() - started
        return ChildResult(returncode=returncode, stdout=_read(stdout), stderr=_read(stderr), seconds=seconds)


def _read(file: IO[bytes]) -> str:
    """Read the end of a child's output."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return file.read().decode(errors="replace")


def look(
    python: str | None, record: PluginRecord | None = None, seconds: float = 30.0, *, importing: bool = False
) -> Introduction:
    """Inspect an interpreter in one child process with a deadline.

    Args:
        python: The interpreter, as for :func:`resolve_interpreter`.
        record: The plugin that is to run there, as it is installed here; None: inspect only the interpreter.
        seconds: The deadline.
        importing: Also import the plugin there and check its structure and its hooks.
    """
    plugin = [] if record is None else [record.kind, record.name, *(["importing"] if importing else [])]
    path = python or ""
    try:
        path = resolve_interpreter(python)
        result = run_child(path, ["-c", _PROGRAM, *plugin], seconds)
    except PluginError as error:
        return Introduction(path=path, problem=error)
    said: dict[str, Any] = {"python": None, "versions": _UNKNOWN}
    for line in result.stdout.splitlines():
        with contextlib.suppress(ValueError):  # start-up files may print other lines
            fields = json.loads(line)
            said |= fields if isinstance(fields, dict) else {}
    found = Introduction(path=path, python=said["python"], versions=said["versions"], seconds=result.seconds)
    problem = _unfit(path, said, result)
    if problem is not None or record is None:
        return attrs.evolve(found, problem=problem)
    return attrs.evolve(found, problems=tuple(_problems(record, path, said, result)))


def _unfit(path: str, said: Mapping[str, Any], result: ChildResult) -> PluginError | None:
    """Return the error that prevents Jackfield from running in an interpreter, if any."""
    if said["python"] is None:
        what = "did not answer in time" if result.returncode is None else "does not work"
        return _unusable(path, what, result.ending)
    found = f"Python {said['python']}, jackfield {said['versions']['jackfield'] or '-'}"
    if tuple(int(part) for part in said["python"].split(".")[:2]) < _OLDEST_PYTHON:
        expected, fix = "Python {}.{} or later".format(*_OLDEST_PYTHON), "make the environment with a newer Python"
        return _unusable(path, "is too old", found, expected=expected, fix=fix)
    if said["versions"]["jackfield"] is None:
        fix = f"{path} -m pip install jackfield"
        return _unusable(path, "has no jackfield", found, expected="jackfield", fix=fix, code="plugin.requirement")
    return None


def _problems(
    record: PluginRecord, path: str, said: Mapping[str, Any], result: ChildResult
) -> Iterator[JackfieldError]:
    """Return the problems of a plugin that a child reported, or the stage at which the child ended."""
    if "introduction" not in said:
        release = f"jackfield=={jackfield.__version__}"
        found, fix = f"jackfield {said['versions']['jackfield']}; {result.ending}", f"{path} -m pip install {release}"
        yield _unusable(path, "does not say what it would run", found, expected=release, fix=fix)
    elif "problems" in said:
        yield from _refusals(record, said["introduction"], path)
        yield from (_rebuilt(fields, path) for fields in said["problems"])
    else:
        late, expected = result.returncode is None, "an import that ends, and leaves the interpreter alive"
        message = f"{said['stage']} did not end in time" if late else f"{said['stage']} ended the interpreter"
        fix = "correct the plugin's module" + ("; raise --deadline if it is only slow" if late else "")
        yield PluginImportError(message, where=record.label, expected=expected, found=result.ending, fix=fix)


def check_introduction(record: PluginRecord, said: Mapping[str, Any], python: str) -> None:
    """Check that a process of the interpreter ``python`` has the same plugin and Jackfield as this one.

    The versions must be equal, because settings are checked here and used there, and the manifest that is read here
    must apply there.

    Raises:
        PluginError: ``plugin.handshake``, ``plugin.requirement``, or the error of the manifest's check there.
    """
    for problem in _refusals(record, said, python):
        raise problem


def _refusals(record: PluginRecord, said: Mapping[str, Any], python: str) -> Iterator[JackfieldError]:
    wanted = {"jackfield": jackfield.__version__, "abi": ABI_VERSIONS[record.kind], "plugin": _identity(record)}
    different = [name for name in wanted if said.get(name) != wanted[name] and (name != "plugin" or said.get(name))]
    if different:
        releases = f"jackfield=={jackfield.__version__} {record.distribution}=={record.version}"
        yield PluginError(
            f"the interpreter {python} has another {' and '.join(different)} than this one",
            code="plugin.handshake",
            where=record.label,
            expected={name: wanted[name] for name in different},
            found={name: said.get(name) for name in different},
            fix=f"{python} -m pip install {releases}, or the same versions here",
        )
    yield from (_rebuilt(fields, python) for fields in said.get("problems", ()))


def _rebuilt(fields: Mapping[str, Any], python: str) -> JackfieldError:
    """Return the error that an interpreter reported."""
    error = rebuilt_error(fields, python)
    if os.path.abspath(python) != os.path.abspath(sys.executable):
        error.message = f"the interpreter {python} refuses the plugin: {error.message}"
        error.fix = f"in {python}: {error.fix or 'install the plugin there'}"
    return error


def _unusable(path: str, what: str, found: str, **details: Any) -> PluginError:
    expected, fix = "an interpreter that starts and prints its version", "run it by hand, or make its environment again"
    given = {"code": "plugin.interpreter", "where": path, "expected": expected, "fix": fix, **details}
    return PluginError(f"the interpreter {path} {what}", found=found, **given)


def introduce(kind: str, name: str) -> dict[str, Any]:
    """Return JSON-ready facts about this process and the plugin that it would load, without importing it.

    ``problems`` has the errors of the check of the plugin's manifest and the missing requirements.
    """
    found = {"pid": os.getpid(), "python": platform.python_version(), "jackfield": jackfield.__version__}
    plugin, problems = None, list[JackfieldError]()
    try:
        record = discover().resolve(name, kind)
        plugin = _identity(record)
        problems.extend(record.usable().missing(record.label))
    except JackfieldError as error:
        problems.append(error)
    described = [error_fields(problem) for problem in problems]
    return {**found, "abi": ABI_VERSIONS.get(kind), "plugin": plugin, "problems": described}


def _identity(record: PluginRecord) -> dict[str, Any]:
    found = {name: getattr(record, name) for name in ("distribution", "version", "abi")}
    return {**found, "capabilities": dict(record.usable().capabilities)}


def main(kind: str, name: str, *importing: str) -> None:
    """Answer :func:`look` in JSON lines and end this process, even if the plugin has running threads.

    The plugin's own output goes to stderr.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    problems: list[JackfieldError] = []

    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=lines, flush=True)

    said = introduce(kind, name)
    say(introduction=said)
    try:
        if importing and not said["problems"]:
            problems.extend(_try(kind, name, say))
    except JackfieldError as error:
        problems.append(error)
    say(problems=[error_fields(problem) for problem in problems])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _try(kind: str, name: str, say: Callable[..., None]) -> Iterator[PluginError]:
    """Import a plugin and yield its problems. Each stage that may hang or crash is reported before it begins."""
    registry = discover()
    record = registry.resolve(name, kind)
    manifest = record.usable()
    say(stage=f"importing {manifest.config.partition(':')[0]}")
    registry.settings_class(kind, name)
    loaded = " and ".join(name for name in _HEAVY if name in sys.modules)
    if loaded:
        message, found = f"importing the config {manifest.config} loads {loaded}", f"{loaded} in sys.modules"
        fix = "move the config class to a module, in a package, that imports nothing heavy"
        details = {
            "where": record.label,
            "expected": "a config module that imports neither",
            "found": found,
            "fix": fix,
        }
        yield PluginError(message, code="plugin.config-class", **details)
    say(stage=f"importing {manifest.object.partition(':')[0]}")
    yield from structure_problems(kind, record.load("object"), record.label)
    if manifest.hooks is not None:
        say(stage=f"importing {manifest.hooks}")
        HookManager((), [manifest])
