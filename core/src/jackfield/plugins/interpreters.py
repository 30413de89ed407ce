"""Interpreters in which plugins run: finding one, and running it as a child with a deadline.

A child is started in a process group of its own, which is ended with it: a plugin that hangs, or leaves processes
behind, costs its deadline and nothing more.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import attrs

from jackfield.errors import PluginError

_KEPT_BYTES = 1_000_000  #: of a child's output


@attrs.frozen(kw_only=True)
class ChildResult:
    """The end of a child process and its output."""

    returncode: int | None  #: None: it was ended at the deadline; negative: the number of a signal
    stdout: str
    stderr: str
    seconds: float

    @property
    def ending(self) -> str:
        """The end in words, with the last line that it wrote to stderr."""
        words = [f"exit code {self.returncode}"]
        if self.returncode is None:
            words = [f"no end within {self.seconds:.1f} s"]
        elif self.returncode < 0:
            words = [f"killed by {signal.Signals(-self.returncode).name}"]
        lines = [line.strip() for line in self.stderr.splitlines() if line.strip()]
        return ", ".join([*words, *lines[-1:]])


def resolve_interpreter(python: str | None, where: str | None = None) -> str:
    """Return the absolute path of an interpreter.

    Args:
        python: A path (``~`` is expanded) or a command on ``PATH``; None: this interpreter.
        where: The setting that names it, for errors; None: the path itself.

    Raises:
        PluginError: ``plugin.interpreter`` when there is no such program.
    """
    if python is None:
        return sys.executable
    path = str(Path(python).expanduser())
    found = shutil.which(path)
    if found is not None:
        return os.path.abspath(found)
    raise PluginError(
        f"the interpreter {python} cannot be started",
        code="plugin.interpreter",
        where=where or python,
        expected="the path of a Python interpreter",
        found="a file that cannot be executed" if Path(path).exists() else "no such file",
        fix="correct the path, or make the environment: python3 -m venv FOLDER, and install jackfield there",
    )


def environment_python(folder: Path) -> str:
    """Return the path of an environment's interpreter."""
    return str(Path(folder).absolute() / "bin" / "python")


def run_child(python: str, arguments: Sequence[str], deadline: float) -> ChildResult:
    """Run an interpreter to its end, or to the deadline; nothing that it started is left behind.

    Args:
        python: The path of the interpreter.
        arguments: The arguments of its command line.
        deadline: Seconds.

    Raises:
        OSError: It cannot be started.
    """
    started = time.monotonic()
    # files, not pipes: a grandchild that keeps a pipe open would delay the end
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
        return ChildResult(returncode=returncode, stdout=_read(stdout), stderr=_read(stderr), seconds=seconds)


def environment_of(python: str) -> dict[str, str]:
    """Return this process's environment; another interpreter does not get what steers imports of this one."""
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}  # the working directory is not on sys.path
    if os.path.abspath(python) != os.path.abspath(sys.executable):
        for name in ("PYTHONPATH", "PYTHONHOME", "__PYVENV_LAUNCHER__"):
            environment.pop(name, None)
    return environment


def _read(file: IO[bytes]) -> str:
    """Read the end of a child's output."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _KEPT_BYTES))
    return file.read().decode(errors="replace")
