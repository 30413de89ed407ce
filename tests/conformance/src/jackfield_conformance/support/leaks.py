"""Detection of leaks: tasks, threads, processes, open files and sockets, shared memory, files."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import attrs
import psutil

from jackfield_conformance.support.processes import adopting, descendants, remaining

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
