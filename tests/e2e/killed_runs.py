"""Runs that are killed: a process that imports everything once and forks one child per start of a run.

    python killed_runs.py MODULE ... < commands.jsonl    # the modules are imported first

Each line of the input is ``{"config": FILE, "overrides": [...], "kill": null or [PLACE, n], "room": null or BYTES}``;
each line of the output is ``{"killed": true}`` or ``{"code": EXIT CODE, "error": STANDARD ERROR}`` of the command.
``room`` is the size that the system lets files grow to. A child ends itself with SIGKILL at its n-th *moment* of a
place. Moments are events of the run and steps in the life of its files, so that a seed names the same moment again:

``anywhere``
    a stage, step, evaluation, synchronisation or checkpoint has ended, or a file of the run's folder is about to be
    opened, renamed or removed
``checkpoint``
    the same, of files in an unfinished or doomed checkpoint only
``/NAME``
    the same, of files whose path has this text only
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import json
import os
import resource
import signal
import sys
from typing import Any

from jackfield.cli import main
from jackfield.config import load_config
from jackfield.plugins import hookimpl

_AUDITED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree")


class Killer:
    """Counts moments; at the one that was asked for, the process is gone."""

    def __init__(self, folder: str, place: str, moment: int) -> None:
        self.folder, self.place, self.left = folder, place, moment
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in _AUDITED and isinstance(arguments[0], str | os.PathLike):
            path = os.fspath(arguments[0])
            part = {"anywhere": "", "checkpoint": ".partial"}.get(self.place, self.place)
            if path.startswith(self.folder) and part in path:
                self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.end()

    def end(self) -> None:
        """Be gone."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _event(self) -> None:
        if self.place == "anywhere":
            self._count()

    @hookimpl
    def stage_ended(self, event: Any) -> None:
        self._event()

    @hookimpl
    def step_ended(self, event: Any) -> None:
        self._event()

    @hookimpl
    def evaluation_ended(self, event: Any) -> None:
        self._event()

    @hookimpl
    def weights_synced(self, event: Any) -> None:
        self._event()

    @hookimpl
    def checkpoint_saved(self, event: Any) -> None:
        self._event()


def child(command: dict[str, Any], answers: int) -> None:
    """Do the run, unless it is killed; tell how it ended."""
    known = set(sys.modules)
    if command["room"] is not None:
        sys.dont_write_bytecode = True  # a cache that is cut off would stay so
        resource.setrlimit(resource.RLIMIT_FSIZE, (command["room"], command["room"]))
    if command["kill"] is not None:
        folder = load_config(command["config"], command["overrides"]).folder
        killer = Killer(folder, *command["kill"])
        running = importlib.import_module("jackfield.compose.run")
        running.run = functools.partial(running.run, hooks=[killer])  # type: ignore[attr-defined]
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            main(["run", command["config"], *command["overrides"]])
    except SystemExit as ended:
        answer = {"code": ended.code, "error": errors.getvalue(), "imported": sorted(set(sys.modules) - known)}
        os.write(answers, json.dumps(answer).encode())


def start(command: dict[str, Any]) -> dict[str, Any]:
    """Fork a child and wait for its end."""
    reading, writing = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.dup2(2, 1)  # standard output is for answers
        try:
            os.close(reading)
            child(command, writing)
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()  # ends with the child
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}
    told: dict[str, Any] = json.loads(answer or '{"code": null, "error": "the child broke down"}')
    for name in told.pop("imported", ()):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)  # once here, for all later children
    return told


def serve() -> None:
    """Import what a run imports, then do what standard input says. Nothing is computed here: children fork safely."""
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    gc.freeze()  # or each child copies what a collection looks at
    for line in sys.stdin:
        print(json.dumps(start(json.loads(line))), flush=True)


if __name__ == "__main__":
    serve()
