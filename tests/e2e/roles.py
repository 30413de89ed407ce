"""Commands in processes of their own, side by side, that import everything once: each is forked.

    python roles.py MODULE ... < orders.jsonl    # the modules are imported first

Orders: ``{"start": NAME, "argv": [...], "die_at": [METHOD, n] or null}`` and ``{"end": NAME}``. A command with
``die_at`` kills itself with SIGKILL at the n-th call of a method. Answers: ``{"line": TEXT, "of": NAME}`` for each line
that a command prints, and ``{"ended": NAME, "status": STATUS}``, negative for a signal.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import os
import selectors
import signal
import sys
from typing import Any

from jackfield.cli import main


def die_at(place: str, count: int) -> None:
    """Have this process end at its n-th call of an asynchronous method, ``module:Class.method``."""
    module, _, path = place.partition(":")
    cls, _, name = path.partition(".")
    owner, left = getattr(importlib.import_module(module), cls), [count]
    begin = getattr(owner, name)

    async def killed(self: Any, *arguments: Any, **keywords: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return await begin(self, *arguments, **keywords)

    setattr(owner, name, killed)


class Children:
    """The commands that run."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self.rests: dict[int, bytes] = {}  #: of lines that are not whole yet, by file
        self.processes: dict[str, int] = {}

    def start(self, name: str, argv: list[str], place: tuple[str, int] | None) -> None:
        reading, writing = os.pipe()
        process = os.fork()
        if process == 0:
            os.dup2(writing, 1)
            os.dup2(writing, 2)
            os.closerange(3, 1024)
            sys.stdin = io.StringIO()
            try:
                if place is not None:
                    die_at(*place)
                main(argv)
            except SystemExit as ended:
                sys.stdout.flush()
                os._exit(int(ended.code or 0))
            finally:
                os._exit(70)
        os.close(writing)
        self.processes[name] = process
        self.selector.register(reading, selectors.EVENT_READ, name)

    def lines(self, file: int) -> list[str] | None:
        """The lines that have come whole; None at the end."""
        content = os.read(file, 1 << 16)
        if not content:
            return None
        *whole, self.rests[file] = (self.rests.get(file, b"") + content).split(b"\n")
        return [line.decode(errors="replace") for line in whole]

    def hear(self, file: int, name: str) -> None:
        """What a command has printed; at its end, how that was."""
        lines = self.lines(file)
        for line in lines or ():
            self.say(line=line, of=name)
        if lines is not None:
            return
        self.selector.unregister(file)
        self.rests.pop(file, None)
        os.close(file)
        _, status = os.waitpid(self.processes.pop(name), 0)
        self.say(ended=name, status=os.waitstatus_to_exitcode(status))

    def obey(self, file: int) -> bool:
        """Do what was ordered; whether there may be more."""
        lines = self.lines(file)
        for order in map(json.loads, lines or ()):
            if "end" in order:
                os.kill(self.processes[order["end"]], signal.SIGTERM)
            else:
                self.start(order["start"], order["argv"], order["die_at"])
        return lines is not None

    @staticmethod
    def say(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    def serve(self) -> None:
        """Do what standard input says, until it ends; then nothing of it is left."""
        self.selector.register(0, selectors.EVENT_READ, None)
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.data is not None:
                        self.hear(key.fd, key.data)
                    elif not self.obey(key.fd):
                        return
        finally:
            for process in self.processes.values():
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)


if __name__ == "__main__":
    for module in sys.argv[1:]:  # nothing is computed here: children fork safely
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.freeze()  # or each child copies what a collection looks at
    Children().serve()
