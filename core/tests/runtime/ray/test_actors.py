"""A worker in an actor: its methods, its errors, its end, and its death by ``kill -9``."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayActorError, RayTaskError

from jackfield.errors import EngineError, RunError, WorkerLost
from jackfield.runtime.ray import Cluster
from jackfield.runtime.workers import resubmitted
from jackfield_testing import refused

from .workers import make_counter, make_failure, make_memory

pytestmark = pytest.mark.timeout(180)

Hosted = Callable[..., Any]


def test_a_stub_is_the_worker_from_afar(hosted: Hosted) -> None:
    """Methods, parts and attributes answer; errors arrive as they were raised; what is cancelled here ends there."""

    async def main() -> None:
        counter, handle = await hosted("a counter", make_counter)
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
        await counter.add(0)  # calls of one caller begin in order: it hangs by now
        hanging.cancel()
        assert await counter.hung()
        impatient = type(counter)(handle, "a counter", 0.05)
        with refused("deadline", "a counter"):
            await impatient.hang()

    asyncio.run(main())


def test_a_worker_that_cannot_be_made_says_why(cluster: Cluster) -> None:
    async def main() -> None:
        handle = await cluster.start("a failure")
        with pytest.raises(EngineError) as caught:
            await cluster.make(handle, make_failure)
        assert "engine.failed" == caught.value.code

    asyncio.run(main())


def test_a_dead_worker_is_named_at_once(cluster: Cluster, hosted: Hosted) -> None:
    """Whoever waits for it learns it, and so does whoever watches."""

    async def main() -> None:
        counter, handle = await hosted("the actor engine, rank 1", make_counter)
        other, other_handle = await hosted("the actor engine, rank 0", make_counter)
        watching = asyncio.ensure_future(cluster.watch([handle, other_handle]))
        hanging = asyncio.ensure_future(counter.hang())
        os.kill(await counter.pid(), signal.SIGKILL)
        for waiting in (hanging, watching):
            with pytest.raises(WorkerLost) as lost:
                await waiting
            assert "worker.died" == lost.value.code
            assert str(lost.value.where).startswith("the actor engine, rank 1"), "and its process, once it has answered"
        with pytest.raises(WorkerLost):
            await counter.add(1)
        assert 1 == await other.add(1)

    asyncio.run(main())


def test_a_worker_without_state_is_started_again_and_its_work_resubmitted(hosted: Hosted) -> None:
    async def main() -> None:
        counter, _ = await hosted("reward worker 0", partial(make_counter, 10), restarts=5)
        first = await counter.pid()
        assert 11 == await counter.add(1)
        os.kill(first, signal.SIGKILL)
        assert 11 == await resubmitted(lambda: counter.add(1), "the sum"), "made anew, and asked again"
        assert first != await counter.pid()

    asyncio.run(main())


def test_a_worker_is_made_in_the_process_that_an_earlier_one_has_left(cluster: Cluster, hosted: Hosted) -> None:
    """Workers that died, or cannot end, leave none."""

    async def main() -> None:
        names = ("rank 0", "rank 1", "rank 2")
        stubs = [(await hosted(name, make_counter))[0] for name in names]
        before = [await stub.pid() for stub in stubs]
        await stubs[0].add(3)
        os.kill(before[1], signal.SIGKILL)
        await stubs[2].refuse_to_end()
        await cluster.rest()
        with refused("worker.died", "rank 0"):
            await stubs[0].count()
        stubs = [(await hosted(name, partial(make_counter, 10)))[0] for name in names]
        assert [10, 10, 10] == [await stub.count() for stub in stubs], "made anew"
        after = [await stub.pid() for stub in stubs]
        assert [True, False, False] == [ours == theirs for ours, theirs in zip(before, after, strict=True)]

    asyncio.run(main())


def test_a_server_that_is_not_healthy_ends_with_its_process(hosted: Hosted) -> None:
    """A request that fails, or is refused, ends nobody who is well."""

    async def main() -> None:
        counter, handle = await hosted("rollout replica 0", partial(make_counter, 10), restarts=1)
        before = await counter.pid()
        for member in ("stumble", "refuse"):
            with pytest.raises(RayTaskError):
                await handle.serve.remote(member, ())
        assert (11, before) == (await handle.serve.remote("add", (1,)), await counter.pid())
        await counter.add(-20)
        with pytest.raises(RayActorError):
            await handle.serve.remote("stumble", ())
        with pytest.raises(WorkerLost):
            await counter.pid()
        assert before != await counter.pid(), "made anew"

    asyncio.run(main())


def test_what_the_cluster_has_no_room_for_is_refused_and_places_are_given_back(cluster: Cluster) -> None:
    async def main() -> None:
        cluster._start_seconds, before = 0.5, cluster._start_seconds
        try:
            with pytest.raises(RunError) as refused:
                await cluster.places(3, {"CPU": 1.0}, "the engine")
        finally:
            cluster._start_seconds = before
        assert "cluster.unavailable" == refused.value.code
        assert "3 places of {'CPU': 1.0} for the engine" in str(refused.value)
        assert "in the whole cluster CPU: 2 of 2 free" == refused.value.found
        taken = await cluster.places(2, {"CPU": 0.5}, "the engine")
        handle = await cluster.start("a worker", group=taken, bundle=1, resources={"CPU": 0.25})
        await cluster.place(handle)
        await cluster.make(handle, partial(SimpleNamespace, read=os.getenv))
        quiet = "RAY_enable_output_error_log_if_still_retry"  # Ray would print each call that it makes again
        assert "0" == await handle.call.remote("read", (quiet,), {})
        await cluster.end(handle)
        with pytest.raises(RayActorError):
            await handle.place.remote()
        cluster.give_back("the engine")
        await cluster.places(2, {"CPU": 1.0}, "somebody else")
        cluster.give_back("somebody else")

    asyncio.run(main())


def test_values_cross_bit_by_bit(hosted: Hosted) -> None:
    """Any dtype and shape, by raw buffers; what comes back may be changed."""
    torch = pytest.importorskip("torch")
    from jackfield.queue import Values, column_from_rows, dense_column, json_column
    from jackfield.runtime.ray import RemoteBackend

    columns = {
        "half": dense_column(torch.randn(3, 2).to(torch.bfloat16)),
        "mask": column_from_rows(
            [torch.ones(2, dtype=torch.bool), torch.zeros(0, dtype=torch.bool), torch.ones(1) > 0]
        ),
        "large": column_from_rows([torch.arange(100_000), torch.arange(3), torch.arange(0)]),
        "none": dense_column(torch.empty(3, 0)),
        "complex": dense_column(torch.randn(3, dtype=torch.complex64)),
        "task": json_column([{"a": 1}, None, "ü"]),
    }

    async def main() -> None:
        stub, _ = await hosted("the storage worker", make_memory)
        backend = RemoteBackend(stub)
        await backend.start()
        rows = Values(backend)
        await rows.put("train", ["a", "b", "c"], columns)
        found = await rows.get("train", ["a", "b", "c"], tuple(columns))
        for name, column in columns.items():
            assert column.values.dtype == found[name].values.dtype
            assert torch.equal(column.values, found[name].values), name
            assert column.encoding == found[name].encoding
            assert (column.offsets is None) == (found[name].offsets is None)
            if column.offsets is not None:
                assert torch.equal(column.offsets, found[name].offsets)
        found["large"].values.add_(1)
        assert 3 == (await backend.stats()).samples

    asyncio.run(main())
