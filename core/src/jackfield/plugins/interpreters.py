"""Interpreters in which plugins run: whether they are there, start, and hold Jackfield, with a deadline on each.

A child is started in a process group of its own, which is ended with it: a plugin that hangs, or leaves processes
behind, costs its deadline and nothing more. Results come back as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import PluginError

__all__ = ["ChildResult", "InterpreterReport", "environment_of", "preflight", "resolve_interpreter", "run_child"]

#: Runs on any Python 3, with nothing installed.
_REPORT = """
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
"""
_OLDEST_PYTHON = (3, 11)
_KEPT_BYTES = 1_000_000  #: of a child's output


@attrs.frozen(kw_only=True)
class ChildResult:
    """How a child ended."""

    returncode: int | None  #: None: it was ended at the deadline; negative: the number of a signal
    stdout: str
    stderr: str
    seconds: float

    @property
    def ending(self) -> str:
        """The end in words."""
        if self.returncode is None:
            return f"no end within {self.seconds:.1f} s"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"exit code {self.returncode}"

    @property
    def last_words(self) -> str:
        """The last line that it wrote to stderr, or nothing."""
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@attrs.frozen(kw_only=True)
class InterpreterReport:
    """What is known of an interpreter without importing anything there."""

    path: str
    python: str | None  #: its version
    versions: Mapping[str, str | None]  #: of jackfield, torch and ray; None: not installed
    seconds: float
    problem: PluginError | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready fields."""
        return {
            "path": self.path,
            "status": "ok" if self.problem is None else "problem",
            "python": self.python,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 3),
            "problems": [] if self.problem is None else [self.problem.as_dict()],
        }


def resolve_interpreter(python: str | None, where: str | None = None) -> str:
    """The absolute path of an interpreter.

    Args:
        python: a path (``~`` is expanded) or a command on ``PATH``; None: this interpreter.
        where: who names it, for errors; None: the path itself.

    Raises:
        PluginError: ``plugin.interpreter`` when there is no such program.
    """
    if python is None:
        return sys.executable
    path = str(Path(python).expanduser())
    found = shutil.which(path)
    if found is not None:
        return os.path.abspath(found)
    exists = Path(path).exists()
    raise PluginError(
        f"the interpreter {python} cannot be started",
        code="plugin.interpreter",
        where=where or python,
        expected="the path of a Python interpreter",
        found="a file that cannot be executed" if exists else "no such file",
        fix="correct the path, or make the environment: python3 -m venv FOLDER, and install jackfield there",
    )


def run_child(python: str, arguments: Sequence[str], deadline: float) -> ChildResult:
    """Run an interpreter to its end, or to the deadline; nothing that it started is left behind.

    Args:
        python: path of the interpreter.
        arguments: of its command line.
        deadline: seconds.

    Raises:
        OSError: it cannot be started.
    """
    started = time.monotonic()
    # files, not pipes: a grandchild that keeps a pipe open would keep us waiting
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        child = subprocess.Popen(
            [python, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=environment_of(python),
            start_new_session=True,
        )
        returncode: int | None = None
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                returncode = child.wait(deadline)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()  # it has been killed: this ends
        seconds = time.monotonic() - started
        texts = [_read(stdout), _read(stderr)]
    return ChildResult(returncode=returncode, stdout=texts[0], stderr=texts[1], seconds=seconds)


def preflight(python: str | None = None, deadline: float = 30.0) -> InterpreterReport:
    """Look whether an interpreter is there, starts, and holds Jackfield.

    Args:
        python: see :func:`resolve_interpreter`.
        deadline: seconds.

    Returns:
        A report; its ``problem`` has the code ``plugin.interpreter``, or ``plugin.requirement`` when Jackfield is
        missing there.
    """
    unknown: dict[str, str | None] = {"jackfield": None, "torch": None, "ray": None}
    try:
        path = resolve_interpreter(python)
        result = run_child(path, ["-c", _REPORT], deadline)
    except PluginError as error:
        return InterpreterReport(path=python or "", python=None, versions=unknown, seconds=0.0, problem=error)
    except OSError as error:
        problem = _unusable(path, f"{type(error).__name__}: {error}")
        return InterpreterReport(path=path, python=None, versions=unknown, seconds=0.0, problem=problem)
    answer = _last_json(result.stdout)
    if result.returncode != 0 or answer is None:
        found = ", ".join(filter(None, (result.ending, result.last_words)))
        problem = _unusable(path, found, late=result.returncode is None)
        return InterpreterReport(path=path, python=None, versions=unknown, seconds=result.seconds, problem=problem)
    return InterpreterReport(
        path=path,
        python=answer["python"],
        versions=answer["versions"],
        seconds=result.seconds,
        problem=_unfit(path, answer),
    )


def _unusable(path: str, found: str, late: bool = False) -> PluginError:
    return PluginError(
        f"the interpreter {path} did not answer in time" if late else f"the interpreter {path} does not work",
        code="plugin.interpreter",
        where=path,
        expected="an interpreter that starts and tells its version",
        found=found,
        fix="run it by hand to see why, or make its environment anew",
    )


def _unfit(path: str, answer: Mapping[str, Any]) -> PluginError | None:
    if tuple(int(part) for part in answer["python"].split(".")[:2]) < _OLDEST_PYTHON:
        return PluginError(
            f"the interpreter {path} is too old",
            code="plugin.interpreter",
            where=path,
            expected="Python {}.{} or later".format(*_OLDEST_PYTHON),
            found=f"Python {answer['python']}",
            fix="make the environment with a newer Python",
        )
    if answer["versions"]["jackfield"] is None:
        return PluginError(
            f"jackfield is not installed in the interpreter {path}",
            where=path,
            expected="jackfield",
            found=f"Python {answer['python']} without it",
            fix=f"{path} -m pip install jackfield",
        )
    return None


def environment_of(python: str) -> dict[str, str]:
    """This process's environment; what steers imports of *this* interpreter is kept from another."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the working directory is not on sys.path
    if os.path.abspath(python) != os.path.abspath(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__"):
            environment.pop(name, None)
    return environment


def _read(file: Any) -> str:
    """The end of a child's output."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return str(file.read().decode(errors="replace"))


def _last_json(text: str) -> dict[str, Any] | None:
    """The last line, if it is a JSON object; start-up files may print before it."""
    lines = text.strip().splitlines()
    try:
        answer = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return answer if isinstance(answer, dict) else None
