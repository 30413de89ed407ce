"""Runs that are killed: a process that imports everything once and forks one child per start of a run.

    python killed_runs.py < commands.jsonl

Each line of the input is ``{"config": FILE, "overrides": [...], "kill": null or [PLACE, n]}``; each line of the output
``{"killed": true}``, ``{"error": TEXT}`` or ``{"steps": n}``. A child ends itself with SIGKILL at its n-th *moment* of
a place. Moments are events of the run and steps in the life of its files, so that a seed names the same moment again:

``anywhere``
    a stage, step, evaluation, synchronisation or checkpoint has ended, or a file of the run's folder is about to be
    opened, renamed or removed
``checkpoint``
    the same, of files in an unfinished or doomed checkpoint only
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

from jackfield.compose import run
from jackfield.config import load_config
from jackfield.errors import JackfieldError
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
            if path.startswith(self.folder) and (self.place == "anywhere" or ".partial" in path):
                self._count()

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0:
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
    config = load_config(command["config"], command["overrides"])
    hooks = [] if command["kill"] is None else [Killer(config.folder, *command["kill"])]
    try:
        answer: dict[str, Any] = {"steps": run(config, hooks=hooks).steps}
    except JackfieldError as error:
        answer = {"error": str(error)}
    os.write(answers, json.dumps(answer).encode())


def start(command: dict[str, Any]) -> dict[str, Any]:
    """Fork a child and wait for its end."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            os.close(reading)
            child(command, writing)
        finally:
            sys.stderr.flush()
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(process, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return {"killed": True}
    return json.loads(answer or '{"error": "the child broke down"}')  # type: ignore[no-any-return]


def main() -> None:
    """Import what a run imports, then do what standard input says. Nothing is computed here: children fork safely."""
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    for line in sys.stdin:
        print(json.dumps(start(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
