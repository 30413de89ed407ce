"""A process that has imported torch and forks one child per order: imports are paid for once."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_SCRIPT = """
import json, sys
begin = json.loads(sys.stdin.readline())
sys.path[:0] = [path for path in begin["path"] if path not in sys.path]
from jackfield_conformance.support.hosts import _serve
_serve(begin["function"], begin["imports"])
"""


class Host:
    """Has children carry orders out, one at a time. It ends with this process.

    Args:
        function: ``module:name`` of what a child calls with its order.
        imports: further modules that the host imports before it forks; none may start a thread.
        environment: variables beside this process's own.
    """

    def __init__(self, function: str, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None):
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # to end it with its child
        )
        atexit.register(self.end)
        self._write({"path": [entry for entry in sys.path if entry], "function": function, "imports": list(imports)})

    @property
    def alive(self) -> bool:
        """Return whether it can take an order."""
        return self._process.poll() is None

    def order(self, order: Mapping[str, Any]) -> None:
        """Have a child do it; :meth:`answer` has to follow."""
        self._write({"path": sys.path, **order})

    def answer(self, seconds: float) -> tuple[int, str] | None:
        """The child's exit status, negative for a signal, and what it raised; None: it has not ended by then."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], max(seconds, 0.0))
        if not ready:
            return None
        status, message = json.loads(self._process.stdout.readline() or '[1, "no answer"]')
        return status, message

    def end(self) -> None:
        """End the process, and a child that has not ended."""
        atexit.unregister(self.end)
        if self.alive:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()

    def _write(self, value: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()


def _serve(function: str, imports: Sequence[str]) -> None:
    """The host's loop: it ends with its standard input."""
    for module in imports:
        importlib.import_module(module)
    module, _, name = function.partition(":")
    carry_out = getattr(importlib.import_module(module), name)
    for line in sys.stdin:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            _obey(carry_out, json.loads(line), writing)
        os.close(writing)
        with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
            message = pipe.read()
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), message]), flush=True)


def _obey(carry_out: Callable[[Mapping[str, Any]], None], order: Mapping[str, Any], pipe: int) -> None:
    status = 1
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # the host's output is its answers
    sys.path[:] = order["path"]
    try:
        carry_out(order)
        status = 0
    except BaseException:
        os.write(pipe, traceback.format_exc().encode()[-4096:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
