"""The processes of a cluster that was started here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

__all__ = ["children", "see_gone", "with_descendants"]

_GONE_SECONDS = 2.0  #: for processes of a cluster, whose workers have put their things away, to go by themselves


def children() -> list[psutil.Process]:
    """Processes that this one has started."""
    import psutil

    return psutil.Process().children()


def with_descendants(process: psutil.Process) -> list[psutil.Process]:
    import psutil

    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def see_gone(processes: Iterable[psutil.Process], seconds: float = _GONE_SECONDS) -> None:
    """Return when all of them are gone; kill those that do not go by themselves within ``seconds``."""
    import psutil

    _, left = psutil.wait_procs(list(processes), timeout=seconds)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GONE_SECONDS)
