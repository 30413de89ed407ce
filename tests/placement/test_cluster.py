"""GPUs of ranks and replicas in a real cluster of two nodes, whose GPUs are only numbers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

pytest.importorskip("ray")

import ray
from ray import cloudpickle
from ray.cluster_utils import Cluster as Nodes

from jackfield.clock import Clock
from jackfield.compose.devices import placement_request
from jackfield.compose.ray_workers import RayWorkers
from jackfield.compose.workers import WorkerFactory
from jackfield.config import make_config
from jackfield.config.sections import RayConfig
from jackfield.errors import RunError, WorkerLost
from jackfield.plugins import discover
from jackfield.routing import Replica
from jackfield.runtime.ray_cluster import Cluster, WorkerSpec
from jackfield.sdk import rpc
from jackfield_testing import refused

from . import workers
from .workers import DEVICE, DeviceReport

pytestmark = pytest.mark.timeout(300)

Run = Callable[..., Any]
ADDRESS = "127.0.0.2"  #: Ray replaces 127.0.0.1


def patiently(start: Callable[[], Any]) -> Any:
    """Start something of Ray, once more if this machine is so busy that Ray's own deadline of 30 s passes."""
    try:
        return start()
    except Exception:
        return start()


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """``run(main())`` runs a coroutine in the module's single event loop, to which connections to workers belong."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """Two nodes: this process is on the first one, with two GPUs; the second one has three."""
    with pytest.MonkeyPatch.context() as patch:
        os.environ.setdefault("RAY_AUTH_TOKEN", "0123456789abcdef" * 4)  # Ray keeps the first one of a process
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        ray._raylet.Config.initialize("")  # Ray has read its settings when it was imported
        cloudpickle.register_pickle_by_value(workers)  # actors cannot import what pytest has imported
        node: Any = {"num_cpus": 8, "object_store_memory": 100_000_000, "node_ip_address": ADDRESS}
        node |= {"include_log_monitor": False}
        head = {**node, "num_gpus": 2, "include_dashboard": False, "no_monitor": True}
        head["_system_config"] = {"health_check_period_ms": 300}  # a node is dead after five that fail
        made = patiently(lambda: Nodes(initialize_head=True, head_node_args=head))
        try:
            patiently(lambda: made.add_node(**node, num_gpus=3))
            yield made
        finally:
            made.shutdown()
    ray._raylet.Config.initialize("")


@pytest.fixture(scope="module")
def cluster(nodes: Nodes, run: Run) -> Iterator[Cluster]:
    made = Cluster(Clock(), workers.make, start_seconds=120.0)
    run(made.open(RayConfig(address=nodes.address), needed_cpus=0))
    yield made
    run(made.close())


def placed(
    cluster: Cluster, *overrides: str, width: int = 1, group: int = 1, roles: tuple[str, ...] = ()
) -> RayWorkers:
    """The workers of a run in the cluster; ``vllm`` replicas of several GPUs need no vLLM to be placed."""
    chosen = (
        "cluster.name=ray",
        "cluster.ray.address=HEAD:1",
        "cluster.device=cuda",
        "rollout.name=vllm",
        f"rollout.tensor_parallel={width}",
    )
    config = make_config({"model": {"path": "none"}}, [*chosen, *overrides])
    made = RayWorkers(WorkerFactory(config=config, registry=discover(), clock=Clock()))
    request = placement_request(config, discover(), roles, generates=True)
    made._cluster, made._request = cluster, attrs.evolve(request, group=group)
    made._role: Any = SimpleNamespace(algorithm=None, generates=True, arrays=False)
    made._interpreters = {}
    return made


async def given(made: RayWorkers, *specs: tuple[Any, int, str]) -> list[WorkerSpec]:
    return [await made._spec(*spec) for spec in specs]


async def seen(cluster: Cluster, *specs: WorkerSpec) -> list[list[str]]:
    """What the processes of workers see: for each its own GPU, as NODE/NAME, and then all."""

    async def start(spec: WorkerSpec) -> list[str]:
        actor = await cluster.start(spec)
        await cluster.make(actor, {"device": spec.worker.device})
        stub: Any = rpc.stub(actor.connection, "DeviceReport", DEVICE, DeviceReport, 60.0)
        return list(await stub.see())

    return await asyncio.gather(*map(start, specs))


def node_of(made: RayWorkers, spec: WorkerSpec, what: str = "the run") -> str:
    return made._nodes[what][spec.bundle]


def gpus_of(made: RayWorkers, spec: WorkerSpec, what: str = "the run") -> list[str]:
    return [f"{node_of(made, spec, what)}/{each}" for each in spec.gpus or ()]


async def end(made: RayWorkers, cluster: Cluster) -> None:
    for name in list(cluster.actors):
        await cluster.end(name)
    for what in list(made._places):
        made._give_back(what)


def test_colocated_roles_share_gpus_and_groups_are_whole(cluster: Cluster, run: Run) -> None:
    """Ranks 2i and 2i + 1, a tensor-parallel group, have the two GPUs of replica i, on one node; each sees its own."""

    async def main() -> None:
        settings = ("cluster.ray.engine_ranks=4", "cluster.replicas=2")
        made = placed(cluster, *settings, width=2, group=2, roles=("actor", "reference"))
        await made._reserve("the run", made._request)
        ranks = [("engine", number, "actor") for number in range(4)]
        specs = await given(made, *ranks, ("engine", 3, "reference"), ("rollout", 0, ""), ("rollout", 1, ""))
        actors, reference, replicas = specs[:4], specs[4], specs[5:]
        assert 4 == len({each for actor in actors for each in gpus_of(made, actor)})
        assert gpus_of(made, actors[3]) == gpus_of(made, reference)
        for number, replica in enumerate(replicas):
            group = actors[2 * number : 2 * number + 2]
            assert [each for actor in group for each in gpus_of(made, actor)] == gpus_of(made, replica)
        assert node_of(made, replicas[0]) != node_of(made, replicas[1])
        fractions = [each.worker.memory_fraction for each in specs]
        assert pytest.approx([0.4] * 4 + [0.1, 0.5, 0.5]) == fractions
        rank, replica = await seen(cluster, actors[3], replicas[1])
        assert gpus_of(made, actors[3]) * 2 == rank
        assert [gpus_of(made, replicas[1])[0], *gpus_of(made, replicas[1])] == replica
        with pytest.raises(RunError) as refused:  # one GPU is free
            await made._spec("rollout", 2)
        assert "1 replica x 2 GPUs = 2 GPUs; a replica has its 2 GPUs on one node" == refused.value.expected
        await end(made, cluster)

    run(main())


def test_separate_roles_share_no_gpu_and_added_replicas_have_their_own(
    cluster: Cluster, run: Run, tmp_path: Path
) -> None:
    async def main() -> None:
        settings = ("cluster.placement=separate", "cluster.ray.engine_ranks=2", f"folder={tmp_path}")
        made = placed(cluster, *settings, group=2, roles=("actor",))
        await made._reserve("the run", made._request)
        *ranks, replica, added = await given(
            made, ("engine", 0, "actor"), ("engine", 1, "actor"), ("rollout", 0, ""), ("rollout", 1, "")
        )
        more = gpus_of(made, added, added.name)
        assert 4 == len({*more, *(each for spec in (*ranks, replica) for each in gpus_of(made, spec))})
        assert node_of(made, ranks[0]) == node_of(made, ranks[1])
        assert {None} == {each.worker.memory_fraction for each in (*ranks, replica, added)}
        assert [[more[0], *more]] == await seen(cluster, added)
        await made.end(1)
        assert ["the run"] == list(made._places)
        await end(made, cluster)

    run(main())


def test_what_does_not_fit_is_refused_at_once(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        made = placed(cluster, "cluster.ray.engine_ranks=8", "cluster.placement=separate", width=4, roles=("actor",))
        with pytest.raises(RunError) as caught:
            await made._reserve("the run", made._request)
        error = caught.value
        assert "cluster.placement" == error.code
        assert "8 ranks + 1 replica x 4 GPUs = 12 GPUs; a replica has its 4 GPUs on one node" == error.expected
        assert error.found in ("5 GPUs on 2 nodes of 2, 3", "5 GPUs on 2 nodes of 3, 2")
        shared = placed(cluster, "cluster.ray.engine_ranks=4", "checkpoint_engine.name=shared", roles=("actor",))
        with refused("cluster.placement", "does not leave a node"):
            await shared._reserve("the run", shared._request)

    run(main())


def test_after_the_death_of_a_node_ranks_are_placed_again(cluster: Cluster, nodes: Nodes, run: Run) -> None:
    """A process that died alone keeps its place; Ray takes its time to note the death of a node."""

    async def main() -> None:
        made = placed(cluster, "cluster.ray.engine_ranks=2", roles=("actor",))
        await made._reserve("the run", made._request)
        (before,) = await given(made, ("engine", 0, "actor"))
        here, there = ray.get_runtime_context().get_node_id(), node_of(made, before)
        assert here != there  # the second node is larger
        await seen(cluster, before)
        actor = cluster.actors[before.name]
        actor.address.process.kill()
        await actor.connection.lost
        await made._leave_dead_nodes()
        assert there == node_of(made, before)
        await asyncio.to_thread(nodes.remove_node, next(iter(nodes.worker_nodes)), allow_graceful=False)
        made._made, cluster.actors["rollout replica 7"] = set(), actor
        with pytest.raises(WorkerLost):
            await made.start(Replica(number=7))
        await made._leave_dead_nodes()
        await made._reserve("the run", made._request)
        (after,) = await given(made, ("engine", 0, "actor"))
        assert here == node_of(made, after)
        await end(made, cluster)

    run(main())
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
