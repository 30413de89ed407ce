"""Entry to a Ray cluster, or to a local one that listens only on loopback and ends with its run."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from jackfield.sdk.ray_processes import children, see_gone, with_descendants

if TYPE_CHECKING:
    import psutil

__all__ = ["HOST", "enter"]

HOST = "127.0.0.1"  #: Ray's processes listen only there if it is the node's only address, else on all interfaces
_NICE = "RAY_worker_niceness"  #: Ray's default gives its workers, which do the run's work, a low CPU priority
_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def enter(address: str | None, options: Mapping[str, Any]) -> list[psutil.Process]:
    """Join the cluster at an address, or start a local one with Ray's ``options``.

    Returns:
        The child processes of this one that were started.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    try:
        if address is None:
            return _start(options)
        ray.init(address=address, log_to_driver=False, configure_logging=False)
        return []
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's handler would end this process before it cleans up


def _start(options: Mapping[str, Any]) -> list[psutil.Process]:
    """Start a cluster; retry if this machine is so busy that Ray's own deadline of 30 s passes."""
    import ray

    os.environ.setdefault(_NICE, "0")
    before = children()
    for last in (False, True):
        with _on_loopback(), _without_sigterm():
            try:
                ray.init(address="local", log_to_driver=False, configure_logging=False, **options)
            except Exception as error:
                family = [each for child in children() if child not in before for each in with_descendants(child)]
                _end_nodes(error)
                see_gone(family, seconds=0.0)
                if last:
                    raise
            else:
                break
    return [each for each in children() if each not in before]


def _end_nodes(error: Exception) -> None:
    """End a node that did not start in time. Ray drops it; only a frame of the traceback refers to it."""
    from ray._private.node import Node

    for frame, _ in traceback.walk_tb(error.__traceback__):
        node = frame.f_locals.get("self")
        if isinstance(node, Node):
            node.kill_all_processes(check_alive=False, wait=True)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Make Ray use :data:`HOST` unchanged for a node that is started in the block.

    Otherwise Ray replaces this address by a public one, so that other nodes can join. This selects Ray's behaviour on
    Windows and macOS, where no cluster has a second node: through the environment for the processes that Ray starts,
    and through Ray's constant for this process, which may have imported Ray already.
    """
    from ray._private import ray_constants

    constant, variables = ray_constants.ENABLE_RAY_CLUSTER, os.environ.copy()
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_VARIABLE] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        os.environ.pop(_VARIABLE)
        os.environ |= {name: value for name, value in variables.items() if name == _VARIABLE}


@contextmanager
def _without_sigterm() -> Iterator[None]:
    """Block SIGTERM in processes that are started in the block, and in their children.

    Schedulers send SIGTERM to every process of a job. It asks the run to end; the processes of its cluster are needed
    for its last checkpoint and end with the run.
    """
    over = threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()  # this process receives the signal in this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
