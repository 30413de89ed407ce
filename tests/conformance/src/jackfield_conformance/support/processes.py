"""Descendant processes, and hosts: processes that have imported torch and fork one child per order."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import psutil

_SPAWN = multiprocessing.get_context("spawn")
_PR_SET_CHILD_SUBREAPER = 36


def descendants() -> frozenset[psutil.Process]:
    """Return all living descendants of this process; on other systems than Linux, none."""
    found = set()
    for process in psutil.Process().children(recursive=True) if sys.platform == "linux" else ():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return frozenset(found)


def remaining(processes: Iterable[psutil.Process], seconds: float) -> frozenset[psutil.Process]:
    """Return the processes that have not ended after ``seconds``, without reaping any, as psutil's wait would do."""
    ends = time.monotonic() + seconds
    left = set()
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(process.pid) if sys.platform == "linux" else -1
            try:
                poll = select.poll()
                poll.register(descriptor, select.POLLIN)
                if not poll.poll(max(ends - time.monotonic(), 0) * 1000):
                    left.add(process)
            finally:
                os.close(descriptor)
    return frozenset(left)


def names(processes: Iterable[psutil.Process]) -> list[str]:
    """Return ids and command lines, for messages."""
    found = []
    for process in sorted(processes, key=lambda each: each.pid):
        with contextlib.suppress(psutil.Error):
            found.append(f"{process.pid} ({' '.join(process.cmdline())[:80]})")
    return found


@contextlib.contextmanager
def adopting() -> Iterator[None]:
    """Adopt processes whose parent ends inside the block, so that they are found."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None) if sys.platform == "linux" else None
    if prctl is None:
        yield
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class Host:
    """A process whose children carry out orders by the function ``module:name``, one at a time.

    It ends with this process. It first imports ``imports``, which may not start threads. ``environment`` is added to
    this process's.
    """

    def __init__(self, function: str, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None):
        self._connection, theirs = _SPAWN.Pipe()
        arguments = (theirs, function, imports, environment or {})
        self._process = _SPAWN.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        atexit.register(self.end)

    @property
    def alive(self) -> bool:
        """Return whether it can take an order."""
        return self._process.is_alive()

    def order(self, order: Mapping[str, Any]) -> None:
        """Send an order to a child; :meth:`answer` must follow."""
        self._connection.send({"path": sys.path, **order})

    def answer(self, seconds: float) -> tuple[int, str] | None:
        """Return the child's exit status, negative for a signal, and its error; None if it has not ended by then."""
        if not self._connection.poll(max(seconds, 0.0)):
            return None
        try:
            status, message = self._connection.recv()
        except EOFError:
            status, message = 1, "no answer"
        return status, message

    def end(self) -> None:
        """End the process and its child."""
        atexit.unregister(self.end)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # type: ignore[arg-type]
        self._process.kill()
        self._process.join()


_HOSTS: dict[str, list[Host]] = {}


def hosts(
    count: int, function: str, imports: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> list[Host]:
    """Return hosts of a function, which are kept; if one has ended, all are replaced."""
    known = _HOSTS.setdefault(function, [])
    if not all(host.alive for host in known):
        while known:
            known.pop().end()
    while len(known) < count:
        known.append(Host(function, imports, environment))
    return list(known)


def _serve(orders: Connection[Any, Any], function: str, imports: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the host's loop, which ends when the other end of the pipe closes."""
    os.setsid()  # so that its child ends with it
    os.environ.update(environment)
    for module in imports:
        importlib.import_module(module)
    module, _, name = function.partition(":")
    carry_out = getattr(importlib.import_module(module), name)
    with contextlib.suppress(EOFError):
        while order := orders.recv():
            reading, writing = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(reading)
                _obey(carry_out, order, writing)
            os.close(writing)
            with os.fdopen(reading, encoding="utf-8", errors="replace") as pipe:
                message = pipe.read()
            orders.send((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), message))


def _obey(carry_out: Callable[[Mapping[str, Any]], None], order: Mapping[str, Any], pipe: int) -> None:
    status = 1
    os.dup2(2, 1)
    sys.path[:] = order["path"]
    try:
        carry_out(order)
        status = 0
    except BaseException:
        os.write(pipe, traceback.format_exc().encode()[-4096:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
