"""Importing large libraries."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """No cyclic garbage collection meanwhile.

    What imports make lives on, so that looking for garbage among it is in vain; it takes a fifth of the time that torch
    and transformers need.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
