"""Tests of a worker in a Ray actor: methods, errors, end, and death by ``kill -9``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("ray")

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, SamplingParams
from jackfield.clock import Clock
from jackfield.compose.ray_workers import RayWorkers
from jackfield.compose.workers import CONTRACTS, WorkerFactory
from jackfield.config import make_config
from jackfield.errors import EngineError, RunError, WorkerLost
from jackfield.plugins import installed
from jackfield.runtime.process import ROLLOUT
from jackfield.runtime.ray_cluster import Actor, Cluster, WorkerSpec
from jackfield.runtime.workers import resubmitted
from jackfield.sdk import rpc
from jackfield_testing import refused

from .workers import COUNTER, Counter

pytestmark = pytest.mark.timeout(180)

Hosted = Run = Callable[..., Any]


def stub(actor: Actor, seconds: float = 60.0) -> Counter:
    return rpc.stub(actor.connection, "Counter", COUNTER, Counter, seconds)


def rollout_stub(actor: Actor) -> BaseRolloutServer:
    return rpc.stub(actor.connection, "worker", ROLLOUT, BaseRolloutServer, 60.0)  # type: ignore[type-abstract]


def test_a_stub_is_the_worker_from_afar(hosted: Hosted, run: Run) -> None:
    """Methods return values, errors keep their class, and cancelling a call here ends it there."""

    async def main() -> None:
        actor = await hosted("a counter")
        counter = stub(actor)
        assert 3 == await counter.add(3)
        assert 7 == await counter.add(2, twice=True)
        assert 7 == await counter.count()
        assert os.getpid() != await counter.pid()
        with pytest.raises(EngineError) as caught:
            await counter.refuse()
        expected = {"code": "engine.state", "message": "no", "where": "here"}
        assert {**expected, "expected": "yes", "found": "no", "fix": "say yes"} == caught.value.as_dict()
        with refused("run.failed", "ZeroDivisionError"):
            await counter.stumble()
        hanging = asyncio.ensure_future(counter.hang())
        await counter.add(0)  # calls of one caller start in order, so the other one hangs by now
        hanging.cancel()
        assert await counter.hung()
        with refused("deadline", "a counter"):
            await stub(actor, 0.05).hang()

    run(main())


def test_a_worker_that_cannot_be_made_says_why(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        actor = await cluster.start(WorkerSpec(name="a failure"))
        with pytest.raises(EngineError) as caught:
            await cluster.make(actor, {"kind": "failure"})
        assert "engine.failed" == caught.value.code

    run(main())


def test_a_dead_worker_is_named_at_once(cluster: Cluster, hosted: Hosted, run: Run) -> None:
    """A pending call and a watcher both raise an error that names the worker."""

    async def main() -> None:
        rank, other = await hosted("the actor engine, rank 1"), await hosted("another")
        counter = stub(rank)
        watching = asyncio.ensure_future(cluster.watch([rank, other]))
        hanging = asyncio.ensure_future(counter.hang())
        os.kill(await counter.pid(), signal.SIGKILL)
        for waiting in (hanging, watching):
            with pytest.raises(WorkerLost) as lost:
                await waiting
            assert "worker.died" == lost.value.code
            assert str(lost.value.where).startswith("the actor engine, rank 1, process")
        with pytest.raises(WorkerLost):
            await counter.add(1)
        assert 1 == await stub(other).add(1)

    run(main())


def test_a_worker_without_state_is_started_again_and_its_work_resubmitted(
    cluster: Cluster, hosted: Hosted, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONTRACTS, Counter, COUNTER)  # type: ignore[arg-type]
    begun = []

    class Workers(RayWorkers):
        async def _make(self, actor: Actor) -> None:
            await cluster.make(actor, {"kind": "counter", "start": 10})
            begun.append(await stub(actor).pid())

        async def _routed(self, worker: Actor, seconds: float) -> int:
            return 0  # a counter generates nothing

    async def main() -> None:
        await hosted("reward worker 0", start=10, restarts=True)
        config = make_config({"model": {"path": "none"}}, ())
        workers = Workers(WorkerFactory(config=config, registry=installed(), clock=Clock()))
        workers._cluster = cluster
        counter = workers._restarting_stub("reward worker 0", Counter)
        first = await counter.pid()
        assert 11 == await counter.add(1)
        os.kill(first, signal.SIGKILL)
        early = asyncio.gather(*(resubmitted(lambda: counter.add(1), "the sum") for _ in range(2)))
        await asyncio.sleep(0.5)  # it is being started, and this call finds no worker
        late = await resubmitted(lambda: counter.add(1), "the sum")
        assert {11, 12, 13} == {late, *await early}, "made again once, and asked again"
        assert [await counter.pid()] == begun
        assert first not in begun

    run(main())


def test_a_worker_that_dies_while_it_is_idle_is_named(
    hosted: Hosted, run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    """The death is logged, because the worker may never be called again."""

    async def main() -> str:
        actor = await hosted("reward worker 7", restarts=True)
        pid = await stub(actor).pid()
        ended = asyncio.Event()
        actor.connection.lost.add_done_callback(lambda _: ended.set())  # after those of the actor
        os.kill(pid, signal.SIGKILL)
        await ended.wait()
        return f"reward worker 7 (process {pid} on node"

    named = run(main())
    assert [True] == [record.message.startswith(named) for record in caplog.records if "died" in record.message]


def test_a_worker_is_made_in_the_process_that_an_earlier_one_has_left(
    cluster: Cluster, hosted: Hosted, run: Run
) -> None:
    """The processes of workers that died or do not end are not reused."""

    async def main() -> None:
        names = ("rank 0", "rank 1", "rank 2")
        stubs = [stub(await hosted(name)) for name in names]
        before = [await each.pid() for each in stubs]
        await stubs[0].add(3)
        os.kill(before[1], signal.SIGKILL)
        await stubs[2].refuse_to_end()
        await cluster.rest()
        with refused("rpc.method"):
            await stubs[0].count()
        stubs = [stub(await hosted(name, start=10)) for name in names]
        assert [10, 10, 10] == [await each.count() for each in stubs], "made again"
        after = [await each.pid() for each in stubs]
        assert [True, False, False] == [ours == theirs for ours, theirs in zip(before, after, strict=True)]

    run(main())


def test_a_server_that_is_not_healthy_ends_with_its_process(hosted: Hosted, run: Run) -> None:
    """A failed request does not end a healthy replica."""

    def request(version: int | None = None) -> GenerateRequest:
        return GenerateRequest(
            request_id="r", prompt_ids=(1,), sampling=SamplingParams(), minimum_weight_version=version
        )

    async def main() -> None:
        actor = await hosted("rollout replica 0", "replica")
        server = rollout_stub(actor)
        before = (await server.generate(request())).request_id
        with refused("run.failed", "ZeroDivisionError"):
            await server.generate(request(1))
        assert before == (await server.generate(request())).request_id
        with pytest.raises(WorkerLost):
            await server.generate(request(9))
        server = rollout_stub(await hosted("rollout replica 0", "replica"))
        assert before != (await server.generate(request())).request_id, "made again"

    run(main())


def test_what_the_cluster_has_no_room_for_is_refused_and_places_are_given_back(cluster: Cluster, run: Run) -> None:
    async def main() -> None:
        (node,) = cluster.nodes()
        assert 2 == node.total["CPU"]
        cluster._start_seconds, before = 0.5, cluster._start_seconds
        try:
            with pytest.raises(RunError) as refused:
                await cluster.places([(node.name, {"CPU": 3.0})], "the engine")
        finally:
            cluster._start_seconds = before
        assert "cluster.unavailable" == refused.value.code
        assert "{'CPU': 3.0} for the engine" in str(refused.value)
        assert "in the whole cluster CPU: 2 of 2 free" == refused.value.found
        taken = await cluster.places([(node.name, {"CPU": 0.5})] * 2, "the engine")
        assert [(), ()] == taken.gpus
        actor = await cluster.start(WorkerSpec(name="a worker", group=taken.group, bundle=1, cpus=0.25))
        await cluster.end("a worker")
        assert not actor.lives
        cluster.give_back("the engine")
        await cluster.places([(node.name, {"CPU": 1.0})] * 2, "somebody else")
        cluster.give_back("somebody else")

    run(main())
