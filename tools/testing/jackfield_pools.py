"""Pools of user code that end, and processes that are awaited, for tests."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield_user_code import UserCodePool


@contextlib.asynccontextmanager
async def pool(file: Path, name: str, **options: Any) -> AsyncIterator[UserCodePool]:
    """A pool that is closed at the end, and then has no process."""
    made = UserCodePool(f"{file}:{name}", **options)
    try:
        yield made
    finally:
        await made.close()
        assert () == made.pids


def alive(pid: int) -> bool:
    """Whether a process exists and is not a zombie that its parent has yet to reap."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


async def until_gone(pid: int) -> None:
    """Wait for the end of a process that is not our child."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await Clock().wait_for(ended.wait(), 20, f"process {pid} to end")
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
