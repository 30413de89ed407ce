"""Entry to a Ray cluster, or to a local one that listens only on loopback and ends with its run."""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import psutil

HOST = "127.0.0.1"  #: Ray's processes listen only there if it is the node's only address, else on all interfaces
_NICE = "RAY_worker_niceness"  #: Ray's default gives its workers, which do the run's work, a low CPU priority
_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_GONE_SECONDS = 2.0  #: time for a cluster's processes to exit by themselves once its workers have cleaned up


def enter(address: str | None, options: Mapping[str, Any]) -> Callable[[], None]:
    """Join the cluster at an address, or start a local one with Ray's ``options``. Return a function that leaves it.

    The function first ends all processes of a cluster that was started here; Ray only asks them to end.
    """
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    started: list[psutil.Process] = []
    try:
        if address is None:
            started = _start(options)
        else:
            ray.init(address=address, log_to_driver=False, configure_logging=False)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray's handler would end this process before it cleans up

    def leave() -> None:
        family = _with_descendants(started)
        ray.shutdown()
        _see_gone(family, _GONE_SECONDS)

    return leave


def _start(options: Mapping[str, Any]) -> list[psutil.Process]:
    """Start a cluster; retry if this machine is so busy that Ray's own deadline of 30 s passes.

    Return its top processes, from which its other processes descend.
    """
    import ray
    from ray._private.node import Node

    os.environ.setdefault(_NICE, "0")
    this = psutil.Process()
    before = this.children()
    for last in (False, True):
        with _shielded():
            try:
                ray.init(address="local", log_to_driver=False, configure_logging=False, **options)
            except Exception as error:
                family = _with_descendants(child for child in this.children() if child not in before)
                nodes = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
                for node in nodes:  # Ray drops a node that did not start; only a frame of the traceback refers to it
                    if isinstance(node, Node):
                        node.kill_all_processes(check_alive=False, wait=True)
                _see_gone(family, seconds=0.0)
                if last:
                    raise
            else:
                break
    return [each for each in this.children() if each not in before]


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    family = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            family += [process, *process.children(recursive=True)]
    return family


def _see_gone(processes: Iterable[psutil.Process], seconds: float) -> None:
    """Wait until all processes have exited; kill those that still run after ``seconds``."""
    _, left = psutil.wait_procs(list(processes), timeout=seconds)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_GONE_SECONDS)


@contextmanager
def _shielded() -> Iterator[None]:
    """Keep a node that is started in the block on :data:`HOST`, and SIGTERM away from its processes.

    Otherwise Ray replaces this address by a public one, so that other nodes can join. This selects Ray's behaviour on
    Windows and macOS, where no cluster has a second node: through the environment for the processes that Ray starts,
    and through Ray's constant for this process, which may have imported Ray already.

    Schedulers send SIGTERM to every process of a job. It asks the run to end; the processes of its cluster are needed
    for its last checkpoint and end with the run.
    """
    from ray._private import ray_constants

    constant, variable, over = ray_constants.ENABLE_RAY_CLUSTER, os.environ.get(_VARIABLE), threading.Event()
    threading.Thread(target=over.wait, daemon=True).start()  # this process receives the signal in this thread
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ray_constants.ENABLE_RAY_CLUSTER = False
    os.environ[_VARIABLE] = "0"
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = constant
        del os.environ[_VARIABLE]
        if variable is not None:
            os.environ[_VARIABLE] = variable
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        over.set()
