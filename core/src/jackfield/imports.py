"""Importing large libraries."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator

__all__ = ["collection_paused"]

_LARGE = 200  #: modules


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile, and after a large import none among what is there then.

    What imports make lives on, so that looking for garbage among it is in vain. With torch and transformers it takes a
    fifth of the time that their import needs, and a quarter of a second in each full collection later, of which the
    interpreter's end has several.
    """
    enabled, before = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before >= _LARGE:
            gc.freeze()
        if enabled:
            gc.enable()
