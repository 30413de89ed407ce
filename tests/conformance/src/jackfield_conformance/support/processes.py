"""Processes of checks, and what a plugin's life leaves behind.

Hosts are processes that have imported torch and fork one child per order. Leaks are tasks, threads, processes, open
files and sockets, shared memory, and files.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
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


_SHARED_MEMORY = Path("/dev/shm")
_SELF = Path("/proc/self")

#: A leak repeats each time; an import, a cache or another process of the machine shows once.
_ATTEMPTS = 3
_GRACE_SECONDS = 5.0  #: for processes to end


@attrs.frozen
class _Held:
    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    processes: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> _Held:
        gc.collect()  # cycles of dead objects hold nothing
        return cls(frozenset(threading.enumerate()), _descriptors(), _processes(), shared_memory())

    def since(self, before: _Held) -> list[str]:
        """Describe what is held beyond ``before``."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()),
            *(f"open file or socket {name}" for name in sorted(self.descriptors - before.descriptors)),
            *(f"process {name}" for name in sorted(self.processes - before.processes)),
            *(f"shared memory {name}" for name in shared_memory_since(before.shared_memory)),
        ]


def _descriptors() -> frozenset[str]:
    if not _SELF.exists():
        return frozenset()
    found = set()
    for entry in os.listdir(_SELF / "fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing is already closed
            found.add(f"{entry} -> {os.readlink(_SELF / 'fd' / entry)}")
    return frozenset(found)


def _processes() -> frozenset[str]:
    return frozenset(str(child.pid) for child in psutil.Process().children())


def shared_memory() -> frozenset[str]:
    """Return the names of all shared memory of this machine."""
    return frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.exists() else frozenset()


def shared_memory_since(before: frozenset[str]) -> list[str]:
    """Return new names since ``before``, except those of another user and those that only other processes hold."""
    return sorted(name for name in shared_memory() - before if _is_ours(_SHARED_MEMORY / name))


def _is_ours(path: Path) -> bool:
    """Return whether this process, a descendant or no process holds the shared memory."""
    try:
        if path.stat().st_uid != os.getuid():
            return False
    except OSError:  # it was removed
        return False
    holders = {process for process in psutil.process_iter() if _holds(process.pid, path)}
    me = psutil.Process()
    return not holders or bool(holders & {me, *me.children(recursive=True)})


def _holds(pid: int, path: Path) -> bool:
    process = Path("/proc") / str(pid)
    with contextlib.suppress(OSError):  # it ended, or belongs to another user
        if any(line.endswith(f" {path}") for line in (process / "maps").read_text().splitlines()):
            return True
        return any(os.readlink(descriptor) == str(path) for descriptor in (process / "fd").iterdir())
    return False


def other_tasks() -> list[str]:
    """Return the names of the running loop's tasks except the calling one."""
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Use ``folder`` as current folder and for temporary files, but not for torch's cache."""
    folder.mkdir(parents=True)
    here, temporary, variables = os.getcwd(), tempfile.tempdir, dict(os.environ)
    os.chdir(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder.with_name("torchinductor")))
    try:
        yield
    finally:
        os.chdir(here)
        tempfile.tempdir = temporary
        os.environ.clear()
        os.environ.update(variables)


def assert_nothing_left(life: Callable[[Path], Awaitable[None]], folder: Path) -> None:
    """Run a plugin's life in a folder, which also has its temporary files; require that nothing is left."""
    left: list[str] = []
    for attempt in range(_ATTEMPTS):
        scratch = folder / f"scratch-{attempt}"
        before = _Held.now()
        with _scratch(scratch), adopting():
            tasks = asyncio.run(_live(life, folder / f"life-{attempt}"))
        left = [
            *(f"task {name}" for name in tasks),
            *_Held.now().since(before),
            *(f"file {path}" for path in sorted(scratch.rglob("*"))),
        ]
        if not left:
            return
    raise AssertionError(f"left behind: {'; '.join(left)}")


async def _live(life: Callable[[Path], Awaitable[None]], folder: Path) -> list[str]:
    """Run the life, give its processes time to end, and return the names of remaining tasks."""
    folder.mkdir(parents=True)
    before = descendants()
    await life(folder)
    tasks = other_tasks()
    await asyncio.to_thread(remaining, descendants() - before, _GRACE_SECONDS)
    return tasks
