"""What keeps a folder of row sets whole: one process at a time writes it, and a disk that fails is named."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DataError, DeadlineExceeded

_LOOK_SECONDS = 0.2  #: between two tries to lock


@asynccontextmanager
async def locked(folder: Path, clock: Clock, seconds: float) -> AsyncIterator[None]:
    """Lock a folder for this process; wait for another one, and name it if it holds the lock for longer.

    The lock ends with its process, also if that is killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = clock.time() + seconds
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if clock.time() >= until:
                    file.seek(0)
                    holder = file.read() or "a process that does not say who it is"
                    what, fix = f"waited {seconds:g} s for {holder}", "let it end, or give this run another folder"
                    details: Any = {"where": str(folder), "expected": "a folder that no other pipeline writes"}
                    raise DeadlineExceeded(what, fix=fix, **details) from None
                await clock.sleep(_LOOK_SECONDS)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into ``data.row-set-write``."""
    try:
        yield
    except OSError as error:
        found = f"{type(error).__name__}: {error}"
        with suppress(OSError):
            there = next(each for each in (folder, *folder.parents) if each.exists())
            found += f" ({shutil.disk_usage(there).free >> 20} MB of the disk were free)"
        fix = "make room, or allow it; the same command goes on with the stages that are complete"
        if isinstance(error, FileExistsError | NotADirectoryError):
            fix = "name a folder in data.pipeline.folder, or remove the file that is in its place"
        details: Any = {"where": str(folder), "expected": "room on the disk, and permission to write"}
        raise DataError("rows cannot be written", code="data.row-set-write", found=found, fix=fix, **details) from error
