"""Interpreters in which plugins run: create, find and inspect them, and run them as children with a deadline.

A process that will load a plugin first reports its versions and missing requirements, before it imports the plugin. A
child has its own process group, which is killed with it, so that a plugin that hangs or leaves processes behind only
costs its deadline.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
from attrs.validators import in_
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jackfield
from jackfield.abc import ABI_VERSIONS
from jackfield.errors import JackfieldError, PluginError, error_fields, rebuilt_error
from jackfield.plugins.hooks import HookManager, package_hooks
from jackfield.plugins.manifest import structure_problems
from jackfield.plugins.registry import PluginRecord, discover
from jackfield.settings import option

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
_STAMP = "jackfield-environment.json"  #: file that describes how an environment was made


@attrs.frozen(kw_only=True)
class EnvironmentSettings:
    """The settings of an environment of ``jackfield env create``, which gets Jackfield and plugins."""

    folder: str | None = option(None, "folder of the environment; null: environments/NAME")
    python: str | None = option(None, "the interpreter that creates it; null: the one that runs Jackfield")
    requires: tuple[str, ...] = option((), "requirements that are installed there")
    constraints: str | None = option(None, "a constraints file")
    installer: str = option("pip", "pip, or uv: faster, on PATH or beside Jackfield's interpreter", in_(("pip", "uv")))
    uninstall: tuple[str, ...] = option((), "packages that are removed afterwards if a dependency installed them")

    def path(self, name: str) -> Path:
        """Return the folder of the environment of this name."""
        return Path(self.folder or Path("environments", name)).expanduser()


@attrs.frozen(kw_only=True)
class Introduction:
    """A child process's report on an interpreter and a plugin in it."""

    path: str
    python: str | None = None  #: the interpreter's version; None: unknown
    versions: Mapping[str, str | None] = _UNKNOWN  #: versions of jackfield, torch and ray; None: not installed
    seconds: float = 0.0
    problems: tuple[JackfieldError, ...] = ()  #: of the plugin there, or the one of an interpreter that is not usable

    @property
    def usable(self) -> bool:
        """Return whether the interpreter itself can run Jackfield; else the plugin is not inspected."""
        return all(problem.where != self.path for problem in self.problems)

    @property
    def missing(self) -> list[JackfieldError]:
        """The errors for requirements of the plugin that are not installed there."""
        return [problem for problem in self.problems if self.usable and problem.code == "plugin.requirement"]

    def check(self, *, complete: bool = True) -> None:
        """Raise the first problem of the interpreter or the plugin. Missing requirements count only if ``complete``."""
        for problem in self.problems:
            if complete or problem not in self.missing:
                raise problem


def resolve_interpreter(python: str | None, where: str | None = None) -> str:
    """Return the absolute path of an interpreter, or raise ``plugin.interpreter`` if there is no such program.

    ``python`` is a path or a command on ``PATH``; None: this interpreter. ``where`` is the setting that names it.
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


def run_bounded(command: Sequence[str], seconds: float, **streams: Any) -> int | None:
    """Run a command in a process group, which is killed with it; return its exit code, None after ``seconds``."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **streams)
    try:
        return child.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()  # it was killed, so this returns


def look(
    python: str | None, record: PluginRecord | None = None, seconds: float = 30.0, *, importing: bool = False
) -> Introduction:
    """Inspect an interpreter, as for :func:`resolve_interpreter`, in one child process with a deadline.

    ``record`` is the plugin that is to run there, as it is installed here; None: inspect only the interpreter. With
    ``importing``, the plugin is also imported there, and its structure and hooks are checked.
    """
    plugin = [] if record is None else [record.kind, record.name, *(["importing"] if importing else [])]
    path, started = python or "", time.monotonic()
    # files, not pipes: a grandchild that keeps a pipe open would delay the end
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            path = resolve_interpreter(python)
            streams: dict[str, Any] = {"stdout": stdout, "stderr": stderr, "env": environment_of(path)}
            code = run_bounded([path, "-c", _PROGRAM, *plugin], seconds, **streams)
        except OSError as error:
            unusable = _unusable(path, "cannot be started", f"{type(error).__name__}: {error}")
            return Introduction(path=path, problems=(unusable,))
        except PluginError as error:
            return Introduction(path=path, problems=(error,))
        texts = []
        for file in (stdout, stderr):
            file.seek(max(0, file.seek(0, os.SEEK_END) - _KEPT_BYTES))
            texts.append(file.read().decode(errors="replace"))
    ending = f"no end within {seconds:.1f} s"
    if code is not None:
        ending = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
    ending = ", ".join([ending, *[line.strip() for line in texts[1].splitlines() if line.strip()][-1:]])
    said: dict[str, Any] = {"python": None, "versions": _UNKNOWN}
    for line in texts[0].splitlines():
        with contextlib.suppress(ValueError):  # start-up files may print other lines
            fields = json.loads(line)
            said |= fields if isinstance(fields, dict) else {}
    answer = {"python": said["python"], "versions": said["versions"], "seconds": time.monotonic() - started}
    found = Introduction(path=path, **answer)
    return attrs.evolve(found, problems=tuple(_problems(found, record, said, ending, code is None)))


def _problems(
    found: Introduction, record: PluginRecord | None, said: Mapping[str, Any], ending: str, late: bool
) -> Iterator[JackfieldError]:
    """Yield the problem of an interpreter, or those of a plugin in it, or the stage at which the child ended."""
    path, release = found.path, found.versions["jackfield"]
    seen = f"Python {found.python}, jackfield {release or '-'}"
    if found.python is None:
        yield _unusable(path, "did not answer in time" if late else "does not work", ending)
    elif tuple(map(int, found.python.split(".")[:2])) < _OLDEST_PYTHON:
        expected, fix = "Python {}.{} or later".format(*_OLDEST_PYTHON), "make the environment with a newer Python"
        yield _unusable(path, "is too old", seen, expected=expected, fix=fix)
    elif release is None:
        fix = f"{path} -m pip install jackfield"
        yield _unusable(path, "has no jackfield", seen, expected="jackfield", fix=fix, code="plugin.requirement")
    elif record is not None and "stage" not in said:
        wanted = f"jackfield=={jackfield.__version__}"
        ended, fix = f"jackfield {release}; {ending}", f"{path} -m pip install {wanted}"
        yield _unusable(path, "does not say what it would run", ended, expected=wanted, fix=fix)
    elif record is not None and said["stage"] is not None:
        message = f"{said['stage']} did not end in time" if late else f"{said['stage']} ended the interpreter"
        expected = "an import that ends, and leaves the interpreter alive"
        fix = "correct the plugin's module" + ("; raise --deadline if it is only slow" if late else "")
        yield PluginError(message, code="plugin.import", where=record.label, expected=expected, found=ending, fix=fix)
    elif record is not None:
        yield from refusals(record, said, path)


def _unusable(path: str, what: str, found: str, **details: Any) -> PluginError:
    expected, fix = "an interpreter that starts and prints its version", "run it by hand, or make its environment again"
    given = {"code": "plugin.interpreter", "where": path, "expected": expected, "fix": fix, **details}
    return PluginError(f"the interpreter {path} {what}", found=found, **given)


def introduce(kind: str, name: str) -> dict[str, Any]:
    """Return JSON-ready facts about this process and the plugin that it would load, without importing it.

    ``problems`` has the errors of the check of the plugin's manifest and the missing requirements.
    """
    plugin, problems = None, list[JackfieldError]()
    try:
        record = discover().resolve(name, kind)
        plugin = record.identity()
        problems.extend(record.usable().missing(record.label))
    except JackfieldError as error:
        problems.append(error)
    found = {"jackfield": jackfield.__version__, "abi": ABI_VERSIONS.get(kind), "plugin": plugin}
    return {**found, "problems": [error_fields(problem) for problem in problems]}


def refusals(record: PluginRecord, said: Mapping[str, Any], python: str) -> Iterator[JackfieldError]:
    """Yield why a process of the interpreter ``python``, which :func:`introduce` described, cannot run a plugin.

    The versions must be equal, because settings are checked here and used there (``plugin.handshake``), and the
    manifest that is read here must apply there (``plugin.requirement``, or the error of its check).
    """
    wanted = {"jackfield": jackfield.__version__, "abi": ABI_VERSIONS[record.kind], "plugin": record.identity()}
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
    for fields in said.get("problems", ()):
        error = rebuilt_error(fields, python)
        if os.path.abspath(python) != os.path.abspath(sys.executable):
            error.message = f"the interpreter {python} refuses the plugin: {error.message}"
            error.fix = f"in {python}: {error.fix or 'install the plugin there'}"
        yield error


def main(kind: str, name: str, *importing: str) -> None:
    """Answer :func:`look` in JSON lines and end this process, even if the plugin has running threads.

    Each stage that may hang or crash is reported before it begins. The plugin's own output goes to stderr.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        print(json.dumps(fields), file=lines, flush=True)

    said, problems = introduce(kind, name), list[JackfieldError]()
    say(**said, stage="reading the manifest")
    try:
        if importing and not said["problems"]:
            record = discover().resolve(name, kind)
            manifest = record.usable()
            if manifest.config is not None:
                say(stage=f"importing {manifest.config.partition(':')[0]}")
                assert record.settings_class
            if loaded := " and ".join(name for name in _HEAVY if name in sys.modules):
                message, expected = f"importing the config {manifest.config} loads {loaded}", "a module without both"
                fix = "move the config class to a module, in a package, that imports nothing heavy"
                details = {"where": record.label, "expected": expected, "found": f"{loaded} in sys.modules"}
                problems.append(PluginError(message, code="plugin.config-class", fix=fix, **details))
            if manifest.object is not None:
                say(stage=f"importing {manifest.object.partition(':')[0]}")
                problems.extend(structure_problems(kind, record.imported(manifest.object), record.label))
            if manifest.hooks is not None:
                say(stage=f"importing {manifest.hooks}")
                package_hooks(manifest) if manifest.kind == "hooks" else HookManager((), [manifest])
    except JackfieldError as error:
        problems.append(error)
    say(stage=None, problems=[*said["problems"], *map(error_fields, problems)])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def create_environment(settings: EnvironmentSettings, folder: Path, installed: Sequence[str], seconds: float) -> bool:
    """Create an environment unless it already exists as described; return whether it was changed.

    If only distributions that are copied from here have changed, only these are installed again. An incomplete
    environment, or one with other settings, is created again; any other folder is not touched. The installer's output
    goes to stderr. An error (``plugin.environment``) names the step that failed. The distributions ``installed`` are
    installed in the same way as in this interpreter; ``seconds`` is the deadline of the whole creation.
    """
    base = resolve_interpreter(settings.python, "environments.*.python")
    installed = _with_local(installed)
    ours = [part for name in installed for part in requirement_as_installed(name)]
    wheels = [hashlib.sha256(Path(part).read_bytes()).hexdigest() for part in ours if Path(part).is_file()]
    requires = sorted(line for name in installed for line in importlib.metadata.requires(name) or ())
    constraints = None if settings.constraints is None else Path(settings.constraints).read_text(encoding="utf-8")
    plan = [base, sys.version, settings.requires, settings.uninstall, constraints, installed, requires]
    wanted = json.dumps({"plan": plan, "installed": [*ours, *wheels]}, indent=1)
    stamp = folder / _STAMP
    made = json.loads(stamp.read_text(encoding="utf-8")) if stamp.is_file() else {}
    if made == json.loads(wanted):
        return False
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").is_file():
        details = {"where": str(folder), "expected": "no folder, an empty one, or an environment"}
        message, fix = "the folder of an environment is something else", "name another folder in the configuration"
        raise PluginError(message, code="plugin.environment", fix=fix, **details)
    pip, python, yes = [environment_python(folder), "-m", "pip", "--disable-pip-version-check"], [], ["--yes"]
    if settings.installer == "uv":
        pip, python, yes = [_uv(), "pip"], ["--python", environment_python(folder)], []
    keep = [] if settings.constraints is None else ["--constraint", settings.constraints]
    steps = [[*pip, "install", *python, "--force-reinstall", "--no-deps", *ours]]
    stamp.unlink(missing_ok=True)
    if made.get("plan") != json.loads(wanted)["plan"]:
        shutil.rmtree(folder, ignore_errors=True)
        steps = [[base, "-m", "venv", str(folder)], [*pip, "install", *python, *keep, *settings.requires, *ours]]
        steps += [[*pip, "uninstall", *python, *yes, *settings.uninstall]] if settings.uninstall else []
    ends = time.monotonic() + seconds
    for step in steps:
        left = max(ends - time.monotonic(), 0.1)
        code = run_bounded(step, left, stdout=sys.stderr, env=environment_of(step[0]))
        if code != 0:
            found = "no end within the deadline" if code is None else f"exit code {code}; what it printed is above"
            expected = f"`{' '.join([os.path.basename(step[0]), *step[1:]])}` to end well"
            fix = "correct the environment in the configuration, or raise --deadline, and give the same command again"
            details = {"where": str(folder), "expected": expected, "found": found, "fix": fix}
            raise PluginError("an environment cannot be made", code="plugin.environment", **details)
    stamp.write_text(wanted, encoding="utf-8")
    return True


def _uv() -> str:
    places = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    if program := shutil.which("uv", path=places):
        return program
    details = {"where": "environments.*.installer", "expected": "uv on PATH", "found": places}
    fix = "pip install uv, or installer: pip"
    raise PluginError("there is no uv to make an environment with", code="plugin.environment", fix=fix, **details)


def requirement_as_installed(name: str) -> list[str]:
    """Return pip's arguments to install a distribution as it is here, or raise ``plugin.requirement``."""
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise PluginError(f"{name} is not installed in this interpreter", where=sys.executable) from error
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    url = origin.get("url", "")
    if not url.startswith("file:"):
        return [f"{distribution.name}=={distribution.version}"]
    path = unquote(urlsplit(url).path)
    return ["--editable", path] if origin.get("dir_info", {}).get("editable") else [path]


def _with_local(names: Sequence[str]) -> list[str]:
    """Add required distributions that are installed here from local files, since no index may have them."""
    found = list(names)
    for name in found:  # it grows during the loop
        for line in importlib.metadata.requires(name) or ():
            required = Requirement(line)
            known = canonicalize_name(required.name) in map(canonicalize_name, found)
            with contextlib.suppress(PluginError):
                if not known and required.marker is None and "==" not in requirement_as_installed(required.name)[-1]:
                    found.append(required.name)
    return found
