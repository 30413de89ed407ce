"""What a plugin may leave behind: tasks, threads, processes, open files and sockets, shared memory, files."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import attrs

__all__ = ["assert_nothing_left", "other_tasks"]

_SHARED_MEMORY = Path("/dev/shm")
_SELF = Path("/proc/self")

#: A leak repeats each time; what happens once is an import, a cache or another process of the machine.
_ATTEMPTS = 3


@attrs.frozen
class _Held:
    threads: frozenset[threading.Thread]
    descriptors: frozenset[str]
    processes: frozenset[str]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> _Held:
        return cls(frozenset(threading.enumerate()), _descriptors(), _processes(), _shared_memory())

    def since(self, before: _Held) -> list[str]:
        """What is held beyond ``before``, in words."""
        return [
            *(f"thread {thread.name}" for thread in self.threads - before.threads if thread.is_alive()),
            *(f"open file or socket {name}" for name in sorted(self.descriptors - before.descriptors)),
            *(f"process {name}" for name in sorted(self.processes - before.processes)),
            *(f"shared memory {name}" for name in sorted(self.shared_memory - before.shared_memory)),
        ]


def _descriptors() -> frozenset[str]:
    if not _SELF.exists():
        return frozenset()
    found = set()
    for entry in os.listdir(_SELF / "fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            found.add(f"{entry} -> {os.readlink(_SELF / 'fd' / entry)}")
    return frozenset(found)


def _processes() -> frozenset[str]:
    found: set[str] = set()
    for task in (_SELF / "task").glob("*/children"):
        with contextlib.suppress(OSError):
            found.update(task.read_text().split())
    return frozenset(found)


def _shared_memory() -> frozenset[str]:
    return frozenset(os.listdir(_SHARED_MEMORY)) if _SHARED_MEMORY.exists() else frozenset()


def other_tasks() -> list[str]:
    """The names of the running loop's tasks beside the calling one."""
    return [task.get_name() for task in asyncio.all_tasks() if task is not asyncio.current_task()]


@contextlib.contextmanager
def _scratch(folder: Path) -> Iterator[None]:
    """Make ``folder`` the current one and the one of temporary files."""
    folder.mkdir(parents=True)
    here, temporary, variable = os.getcwd(), tempfile.tempdir, os.environ.get("TMPDIR")
    os.chdir(folder)
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        os.chdir(here)
        tempfile.tempdir = temporary
        if variable is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = variable


def assert_nothing_left(life: Callable[[Path], Awaitable[list[str]]], folder: Path) -> None:
    """Live a plugin's life and look at what is left of it.

    Args:
        life: makes, uses and stops the plugin in the folder that it is given; returns :func:`other_tasks` at its end.
        folder: for the lives and, beside them, for temporary files.
    """
    left: list[str] = []
    for attempt in range(_ATTEMPTS):
        scratch = folder / f"scratch-{attempt}"
        before = _Held.now()
        with _scratch(scratch):
            tasks = asyncio.run(_live(life, folder / f"life-{attempt}"))
        left = [
            *(f"task {name}" for name in tasks),
            *_Held.now().since(before),
            *(f"file {path}" for path in sorted(scratch.rglob("*"))),
        ]
        if not left:
            return
    raise AssertionError(f"left behind: {'; '.join(left)}")


async def _live(life: Callable[[Path], Awaitable[list[str]]], folder: Path) -> list[str]:
    folder.mkdir(parents=True)
    return await life(folder)
