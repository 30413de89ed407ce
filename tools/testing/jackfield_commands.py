"""The command line for tests: one process imports torch once, and each ``jackfield`` command is a fork of it.

    completed = jackfield("run", FILE, "schedule.steps=2")              # waits for the end
    command = jackfield.start("run", FILE, environment={"NAME": "value"})
    command.pid, command.wait(60).code                                  # 143: ended by SIGTERM (or exit code 143)

The fixture ``jackfield`` (one server for each pytest process) is in ``tests/conftest.py``. A command is a process with
a session of its own, as in a shell of its own, and finds modules in its PYTHONPATH; its standard output and error are
files. A command that a test has left running is killed with everything in its session's process group at the end of the
test session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a command ended: its exit code (128 + n where signal n ended it), and what it printed."""

    code: int
    out: str
    error: str


class Command:
    """A running command."""

    def __init__(self, pid: int, files: Path) -> None:
        self.pid = pid
        self._files = files
        self._ended = threading.Event()
        self._code = -1

    def ended(self, code: int) -> None:
        """Called by the server's reader."""
        self._code = code
        self._ended.set()

    @property
    def running(self) -> bool:
        return not self._ended.is_set()

    def send(self, number: int) -> None:
        """Send a signal to this process alone."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 300.0) -> Completed:
        """Wait for the end.

        Raises:
            AssertionError: it has not ended in time; it is killed, and what it printed is in the message.
        """
        if not self._ended.wait(seconds):
            self.kill()
            raise AssertionError(f"not ended after {seconds:g} s:\n{self.out}\n{self.error}")
        return Completed(self._code, self.out, self.error)

    def kill(self) -> None:
        """End it and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._files.with_suffix(".out").read_text(errors="replace")

    @property
    def error(self) -> str:
        """What it has printed on standard error so far."""
        return self._files.with_suffix(".err").read_text(errors="replace")


class CommandServer:
    """Starts commands in forks of one process. Close it, or use it as a context manager."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._numbers = folder, itertools.count()
        self._commands: dict[int, Command] = {}
        self._started: dict[int, tuple[threading.Event, list[int]]] = {}
        variables = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "MPLBACKEND": "Agg",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __call__(self, *arguments: str, seconds: float = 300.0, **options: Any) -> Completed:
        """Do ``jackfield ARGUMENTS`` and wait for its end."""
        return self.start(*arguments, **options).wait(seconds)

    def start(
        self, *arguments: str, environment: Mapping[str, str] | None = None, folder: Path | None = None
    ) -> Command:
        """Start ``jackfield ARGUMENTS``, with further variables of the environment, in a working folder."""
        number = next(self._numbers)
        files = self._folder / f"command-{number}"
        for suffix in (".out", ".err"):
            files.with_suffix(suffix).touch()
        started: tuple[threading.Event, list[int]] = (threading.Event(), [])
        self._started[number] = started
        command = {
            "number": number,
            "arguments": list(arguments),
            "environment": dict(environment or {}),
            "folder": str(folder or self._folder),
            "files": str(files),
        }
        assert self._process.stdin is not None
        print(json.dumps(command), file=self._process.stdin, flush=True)
        assert started[0].wait(300), "the server of commands does not answer"
        return self._commands[started[1][0]]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "code" in told:
                self._commands[told["pid"]].ended(told["code"])
                continue
            pid, number = told["pid"], told["number"]
            self._commands[pid] = Command(pid, self._folder / f"command-{number}")
            event, pids = self._started.pop(number)
            pids.append(pid)
            event.set()

    def close(self) -> None:
        """End what is left, and the server."""
        for command in self._commands.values():
            if command.running:
                command.kill()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._reader.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _child(command: dict[str, Any]) -> None:
    """What a fork does; it does not return."""
    code: object = 70
    try:
        os.setsid()
        for name, number in ((".out", 1), (".err", 2)):
            file = os.open(command["files"] + name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, number)
            os.close(file)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(command["folder"])
        os.environ.update(command["environment"])
        sys.path[:0] = filter(None, command["environment"].get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["jackfield", *command["arguments"]]
        from jackfield.cli import main

        main(command["arguments"])
    except SystemExit as ended:
        code = 0 if ended.code is None else ended.code
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    finally:
        import atexit

        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code if isinstance(code, int) else 1)


def _serve() -> None:
    """Import what commands import, then start what standard input says. Nothing is computed: children fork safely."""
    import tensordict  # noqa: F401
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import jackfield.compose  # noqa: F401

    commands = os.fdopen(os.dup(0), "rb", buffering=0)
    answers = os.dup(1)
    os.dup2(2, 1)
    ends, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup)
    selector = selectors.DefaultSelector()
    selector.register(commands, selectors.EVENT_READ)
    selector.register(ends, selectors.EVENT_READ)
    left = b""
    while True:
        ready = {key.fileobj for key, _ in selector.select()}
        if ends in ready:
            os.read(ends, 4096)
            _reap(answers)
        if commands in ready:
            read = os.read(commands.fileno(), 65536)
            if not read:
                return
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                _start(json.loads(line), answers, (commands.fileno(), answers, ends, wakeup))


def _start(command: dict[str, Any], answers: int, ours: tuple[int, ...]) -> None:
    pid = os.fork()
    if pid == 0:
        for number in ours[1:]:
            os.close(number)
        _child(command)
    os.write(answers, json.dumps({"pid": pid, "number": command["number"]}).encode() + b"\n")


def _reap(answers: int) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        os.write(answers, json.dumps({"pid": pid, "code": code if code >= 0 else 128 - code}).encode() + b"\n")


if __name__ == "__main__":
    _serve()
