"""Functions for the processes of a cluster that this process started."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

__all__ = ["children", "see_gone", "with_descendants"]

_GONE_SECONDS = 2.0  #: time for a cluster's processes to exit by themselves once its workers have cleaned up


def children() -> list[psutil.Process]:
    """Return the child processes of this process."""
    import psutil

    return psutil.Process().children()


def with_descendants(process: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def see_gone(processes: Iterable[psutil.Process], seconds: float = _GONE_SECONDS) -> None:
    """Wait until all processes have exited; kill those that still run after ``seconds``."""
    import psutil

    _, left = psutil.wait_procs(list(processes), timeout=seconds)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GONE_SECONDS)
