"""Settings of Jackfield's own processes: garbage collection, also during large imports, and what is logged."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator

_LARGE = 200  #: modules
LOG_LEVEL = "JACKFIELD_LOG_LEVEL"  #: environment variable with the lowest level that own processes log
_own = False


def own_process() -> None:
    """Mark this process as Jackfield's own: it collects garbage less often, and may exempt objects from collection.

    It logs what has at least the level ``JACKFIELD_LOG_LEVEL`` to stderr; without the variable, warnings and errors.
    """
    global _own
    log = logging.getLogger("jackfield")
    if (level := os.environ.get(LOG_LEVEL, "").upper()) in logging.getLevelNamesMapping():
        log.setLevel(level)
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("%(levelname)s %(process)d: %(message)s"))
            log.addHandler(handler)
    _own = True
    gc.set_threshold(50_000, 20, 50)  # see docs/decisions/0021-collection-in-own-processes.md


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause cyclic garbage collection; in our own process, exempt the objects of a large import permanently.

    Objects from imports stay alive. Searching them for garbage takes a fifth of the import time of torch and
    transformers, and a quarter of a second in each later full collection, of which there are several at exit.
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
