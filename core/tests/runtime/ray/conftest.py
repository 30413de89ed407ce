"""A small cluster for the tests of a module, whose token is in the environment and not in the home folder."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

from ray import cloudpickle

from jackfield.clock import Clock
from jackfield.config.sections import RayConfig
from jackfield.runtime.ray_cluster import Actor, Cluster, WorkerSpec

from . import workers


def descendants(pid: int) -> set[int]:
    """Return the ids of all processes below ``pid``."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found: set[int] = set()
    new = [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, ()) if child not in found]
        found.update(new)
    return found


def alive(pids: set[int]) -> set[int]:
    """Return the ids of processes that exist and are no zombies."""
    found = set()
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(pid)
    return found


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[..., Any]]:
    """``run(main())`` runs a coroutine in the module's single event loop, to which connections to workers belong."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, run: Callable[..., Any]) -> Iterator[Cluster]:
    """An open cluster with two CPUs; after the module, none of its processes is left."""
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("home")
        patch.setenv("HOME", str(home))
        cloudpickle.register_pickle_by_value(workers)  # actors cannot import what pytest has imported
        before = descendants(os.getpid())
        made = Cluster(Clock(), workers.make, start_seconds=120.0)
        run(made.open(RayConfig(num_cpus=2, object_store_bytes=100_000_000), needed_cpus=1))
        try:
            yield made
        finally:
            ours = descendants(os.getpid()) - before
            assert ours, "a cluster has processes"
            os.kill(max(ours), signal.SIGSTOP)  # a worker's process, which cannot react to a request to end
            run(made.close())
            assert set() == alive(ours), "a process of the cluster is left"
            assert [] == list(home.rglob("*token*")), "a token was written to the home folder"


@pytest.fixture
def hosted(cluster: Cluster) -> Callable[..., Any]:
    """``await hosted(name, kind, **options)`` returns the actor of a new worker; a counter begins at ``start``."""

    async def start(name: str, kind: str = "counter", start: int = 0, **options: Any) -> Actor:
        actor = await cluster.start(WorkerSpec(name=name, **options))
        await cluster.make(actor, {"kind": kind, "start": start})
        return actor

    return start
