"""Importing large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

_LARGE = 200  #: modules
_own = False


def own_process() -> None:
    """Say that this process does nothing but Jackfield's work, so that what large imports find there may stay."""
    global _own
    _own = True


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; in a process of our own, exempt what a large import has brought for good.

    What imports make lives on. To look for garbage among it takes a fifth of the time in which torch and transformers
    are imported, and a quarter of a second in each full collection later, of which the interpreter's end has several.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if _own and len(sys.modules) - before >= _LARGE:
            gc.freeze()
        if enabled:
            gc.enable()
