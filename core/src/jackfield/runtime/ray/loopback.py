"""A Ray cluster of this machine alone: no port of it can be reached from another one, and it ends with its run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HOST", "on_loopback", "without_sigterm"]

HOST = "127.0.0.1"  #: Ray's processes listen there alone where a node has just this address, else on all interfaces
_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


@contextmanager
def on_loopback() -> Iterator[None]:
    """While a node is started in the block, Ray takes :data:`HOST` as it is.

    Otherwise it replaces this address by a public one, so that other nodes could join. What it does on Windows and
    macOS, where no cluster has a second node, is asked for here: by the environment for the processes that it starts,
    and by its constant for this one, which may have imported Ray already.
    """
    from ray._private import ray_constants

    constant, variable = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(_VARIABLE)
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_VARIABLE] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        if variable is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = variable


@contextmanager
def without_sigterm() -> Iterator[None]:
    """What is started in the block never hears SIGTERM, and neither do its children.

    Schedulers send that signal to every process of a job. It asks the run to end; the processes of its cluster are
    needed for its last checkpoint, and end with it.
    """
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()  # through which this process itself still hears it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
