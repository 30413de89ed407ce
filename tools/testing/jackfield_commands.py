"""Processes for tests: one process for each interpreter imports torch once, and commands are forks of it.

    completed = jackfield("run", FILE, "schedule.steps=2")              # waits for the end
    command = jackfield.start("run", FILE, environment={"NAME": "value"})
    command.pid, command.wait(60).code                                  # 143: ended by SIGTERM (or exit code 143)

The fixture ``jackfield`` (one server for each pytest process) is in ``jackfield_testing``. A command is a process with
a session of its own, as in a shell of its own, and finds modules in its PYTHONPATH; its standard output and error are
files. A command that a test has left running is killed with everything in its session's process group at the end of the
test session.

The processes of pytest are such forks, too: ``jackfield_units`` starts them with ``program="pytest"``. Each of them
leaves a fork of itself behind before it does anything, and the fixture ``jackfield`` takes that one as its server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import itertools
import json
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

#: What commands and tests import, where it is installed. The one thread that this starts is the memory allocator's of
#: pyarrow (jemalloc), which expects forks.
IMPORTS = (
    "tensordict",
    "transformers.convert_slow_tokenizer",
    "transformers.models.qwen3.modeling_qwen3",
    "jackfield.cli.commands",
    "jackfield.compose",
    "jackfield.queue.values",
    "jackfield.weights.in_process",
    "jackfield_agent_single_turn.agent",
    "jackfield_engine_fsdp.engine",
    "jackfield_reward_rules.judge",
    "jackfield_rollout_transformers.server",
    "jackfield_user_code.workers",
    "pandas",  # pyarrow imports it at its first array
    "pyarrow.compute",
    "pyarrow.ipc",
    "jackfield_transport_zmq.backend",
    "matplotlib.figure",
    "tensorboard.summary.writer.record_writer",
    "pytest",
    "rich.console",
)

#: Set for each command; the caller's own values of the environment come first.
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "MPLBACKEND": "Agg",
}


class ServerEnded(Exception):
    """The process that should start a command has ended."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the server of commands ended with {code}")
        self.code = code


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a command ended: its exit code (128 + n where signal n ended it), and what it printed."""

    code: int
    out: str
    error: str


class Command:
    """A running command."""

    def __init__(self, pid: int, out: Path, error: Path) -> None:
        self.pid = pid
        self._out, self._error = out, error
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
        return self._out.read_text(errors="replace")

    @property
    def error(self) -> str:
        """What it has printed on standard error so far."""
        return self._error.read_text(errors="replace")


@dataclasses.dataclass(frozen=True)
class _Server:
    """A process that forks: where it reads, where it answers, and how to wait for its end."""

    commands: IO[str]
    answers: IO[str]
    wait: Callable[[], int]


class CommandServer:
    """Starts commands in forks of one process. Close it, or use it as a context manager."""

    def __init__(self, folder: Path, python: str = sys.executable, imports: Sequence[str] = IMPORTS) -> None:
        """
        Args:
            folder: for what commands print.
            python: the interpreter.
            imports: modules that the server's process imports, where they are installed.
        """
        self._folder, self._numbers = folder, itertools.count()
        self._commands: dict[int, Command] = {}
        self._started: dict[int, tuple[threading.Event, list[Command], Path, Path]] = {}
        self._variables = {**os.environ, **_VARIABLES}
        self._sending = threading.Lock()
        self._server = _spare.pop() if _spare and python == sys.executable else _started(python, imports)
        self._gone = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __call__(self, *arguments: str, seconds: float = 300.0, **options: Any) -> Completed:
        """Do ``jackfield ARGUMENTS`` and wait for its end."""
        return self.start(*arguments, **options).wait(seconds)

    def start(
        self,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        program: str = "jackfield",
        output: Path | None = None,
    ) -> Command:
        """Start ``PROGRAM ARGUMENTS``, with further variables of the environment, in a working folder.

        Args:
            program: ``jackfield``, ``jackfield_conformance``, ``pytest``, ``python`` (a file; warnings are errors
                where PYTHONWARNINGS says so), or ``ray workers`` (see ``jackfield_ray_forks``).
            output: a file for standard output and error together; default: a file for each.

        Raises:
            ServerEnded: the server's process is no longer there.
        """
        number = next(self._numbers)
        out = output or self._folder / f"command-{number}.out"
        error = output or out.with_suffix(".err")
        for file in (out, error):
            file.write_bytes(b"")
        event: threading.Event = threading.Event()
        command: list[Command] = []
        self._started[number] = (event, command, out, error)
        message = {
            "number": number,
            "program": program,
            "arguments": list(arguments),
            "environment": {**self._variables, **(environment or {})},
            "path": (environment or {}).get("PYTHONPATH", ""),
            "folder": str(folder or self._folder),
            "out": str(out),
            "error": str(error),
        }
        with self._sending, contextlib.suppress(BrokenPipeError):
            print(json.dumps(message), file=self._server.commands, flush=True)
        if self._gone:
            event.set()
        assert event.wait(300), "the server of commands does not answer"
        if not command:
            raise ServerEnded(self._server.wait())
        return command[0]

    def _read(self) -> None:
        for line in self._server.answers:
            answer = json.loads(line)
            if "code" in answer:
                self._commands[answer["pid"]].ended(answer["code"])
                continue
            event, command, out, error = self._started.pop(answer["number"])
            command.append(Command(answer["pid"], out, error))
            self._commands[answer["pid"]] = command[0]
            event.set()
        self._gone = True
        for event, *_ in list(self._started.values()):
            event.set()

    def close(self) -> None:
        """End what is left, and the server."""
        for command in self._commands.values():
            if command.running:
                command.kill()
        with contextlib.suppress(BrokenPipeError):
            self._server.commands.close()
        self._server.wait()
        self._reader.join(10)
        self._server.answers.close()

    def __enter__(self) -> CommandServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _started(python: str, imports: Sequence[str]) -> _Server:
    """Start an interpreter, which imports what commands need."""
    process = subprocess.Popen(
        [python, __file__, *imports],
        env={**os.environ, **_VARIABLES},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    return _Server(process.stdin, process.stdout, lambda: process.wait(60))


#: The server that a fork for pytest has left behind for the fixture ``jackfield``.
_spare: list[_Server] = []


def _leave_a_spare() -> None:
    """Fork a server for the commands of this process, which has not done anything yet."""
    commands, ours = os.pipe()
    theirs, answers = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            os.close(theirs)
            _loop(commands, answers)
        finally:
            os._exit(0)
    os.close(commands)
    os.close(answers)
    _spare.append(
        _Server(os.fdopen(ours, "w"), os.fdopen(theirs), lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    )


def _child(command: dict[str, Any]) -> None:
    """What a fork does; it does not return."""
    code: object = 70
    try:
        os.setsid()
        for name, number in (("out", 1), ("error", 2)):
            file = os.open(command[name], os.O_WRONLY | os.O_APPEND)
            os.dup2(file, number)
            os.close(file)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        os.chdir(command["folder"])
        os.environ.clear()
        os.environ.update(command["environment"])
        sys.path[:0] = filter(None, command["path"].split(os.pathsep))
        sys.argv = [command["program"], *command["arguments"]]
        code = _PROGRAMS[command["program"]](command["arguments"])
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


def _jackfield(arguments: list[str]) -> int:
    from jackfield.cli import main

    main(arguments)
    return 0


def _pytest(arguments: list[str]) -> int:
    import pytest

    sys.path.insert(0, os.getcwd())
    _leave_a_spare()
    return int(pytest.main(arguments))


def _conformance(arguments: list[str]) -> int:
    from jackfield_conformance.__main__ import main

    return main(arguments)


def _python(arguments: list[str]) -> int:
    import random
    import runpy
    import warnings

    random.seed()  # the server's state is in every fork
    if os.environ.get("PYTHONWARNINGS") == "error":
        warnings.simplefilter("error")
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


def _ray_workers(arguments: list[str]) -> int:
    import jackfield_ray_forks

    return jackfield_ray_forks.serve(*arguments)


_PROGRAMS = {
    "jackfield": _jackfield,
    "jackfield_conformance": _conformance,
    "pytest": _pytest,
    "python": _python,
    "ray workers": _ray_workers,
}


def serve(imports: Sequence[str]) -> None:
    """Import modules, then start what standard input says. Nothing is computed: children fork safely."""
    for name in imports:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()
    commands, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _loop(commands, answers)


def _loop(commands: int, answers: int) -> None:
    """Start what one pipe says, and write to the other how it went, until the first is closed."""
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
            read = os.read(commands, 65536)
            if not read:
                return
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                _start(json.loads(line), answers, (commands, answers, ends, wakeup, selector.fileno()))


def _start(command: dict[str, Any], answers: int, ours: tuple[int, ...]) -> None:
    pid = os.fork()
    if pid == 0:
        for number in ours:
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
    from jackfield_commands import serve as imported  # under its name, so that a fork that imports it shares its state

    imported(sys.argv[1:])
