"""The backend in a real cluster that all of these tests share: its contract, and processes that share rows and die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray
import torch

from jackfield.abc.transfer_queue import GetRequest, KeysRequest, PutRequest, TransferQueueContext
from jackfield.clock import Clock
from jackfield.config.sections import RayConfig
from jackfield.errors import QueueError
from jackfield.runtime.ray_cluster import Cluster
from jackfield.sdk.cells import dense_column
from jackfield_conformance import certify
from jackfield_queue_machine import check_queue_against_model
from jackfield_queue_model import check_against_model
from jackfield_testing import in_loop, refused
from jackfield_transport_ray.backend import RayBackend
from jackfield_transport_ray.config import Config

WIDTH = 1 << 15  #: float32 of a row

cloudpickle: Any = ray.cloudpickle
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # a worker of Ray cannot import this module


@pytest.fixture(scope="module", autouse=True)
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A small one, as a run starts it; nothing of it is in the user's home folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        patch.setenv("OMP_NUM_THREADS", "1")
        made = Cluster(Clock(), print, start_seconds=120.0)
        asyncio.run(made.open(RayConfig(num_cpus=1, object_store_bytes=100_000_000), needed_cpus=1))
        try:
            yield
        finally:
            asyncio.run(made.close())


@pytest.mark.timeout(180)
def test_the_plugin_is_certified() -> None:
    """The certificate run of ``jackfield plugins check ray``: every check passes."""
    assert "full" == certify("transfer_queue:ray").level


@pytest.mark.timeout(120)
def test_the_queue_is_a_dict() -> None:
    check_against_model(lambda context: RayBackend(Config(), context), examples=5)


@pytest.mark.timeout(120)
def test_a_queue_with_ray_does_what_its_model_does() -> None:
    check_queue_against_model(lambda context: RayBackend(Config(), context))


@contextlib.asynccontextmanager
async def opened(**settings: Any) -> AsyncIterator[RayBackend]:
    """A started backend, closed at the end."""
    backend = RayBackend(Config(**settings), TransferQueueContext())
    await backend.start()
    try:
        yield backend
    finally:
        await backend.close()


async def put(backend: RayBackend, values: dict[str, float], column: str = "x") -> None:
    """A row for each value, which fills it."""
    rows = torch.tensor(list(values.values()))[:, None].expand(-1, WIDTH).contiguous()
    await backend.put(PutRequest(partition="p", keys=tuple(values), columns={column: dense_column(rows)}))


def asked(*keys: str, column: str = "x") -> GetRequest:
    return GetRequest(partition="p", keys=keys, columns=(column,))


async def values(backend: RayBackend, *keys: str) -> list[float]:
    """The value of each row."""
    return [float(row[-1]) for row in (await backend.get(asked(*keys))).columns["x"].values]


async def listed(backend: RayBackend) -> dict[str, set[str]]:
    return {key: set(names) for (_, key), names in (await backend.keys(KeysRequest())).samples.items()}


async def until_it_fails(backend: RayBackend, *keys: str) -> None:
    """Read again and again: Ray learns of deaths by and by."""
    while True:
        await values(backend, *keys)


class Producer:
    """A process that puts."""

    async def begin(self, queue: str) -> int:
        self.backend = RayBackend(Config(queue=queue), TransferQueueContext())
        await self.backend.start()
        await put(self.backend, {"b": 2.0, "c": 3.0})
        await put(self.backend, {"a": 9.0}, "late")
        return os.getpid()

    async def read(self) -> list[float]:
        return await values(self.backend, "a", "c")


@pytest.mark.timeout(120)
@in_loop
async def test_rows_of_a_killed_process_are_lost_by_name_and_no_others() -> None:
    """Each of two processes reads what the other has put. After a ``kill -9`` of one, exactly the rows are lost of
    which it had put a column; they can be put anew."""
    async with opened(queue="shared") as backend, opened() as alone:
        await put(backend, {"a": 1.0, "d": 4.0})
        await put(alone, {"a": 5.0})
        producer: Any = ray.remote(Producer).options(num_cpus=0).remote()
        pid: Any = ray.get(producer.begin.remote("shared"))
        assert [1.0, 2.0, 3.0] == await values(backend, "a", "b", "c")
        assert [1.0, 3.0] == ray.get(producer.read.remote())
        assert {"a": {"late", "x"}, "b": {"x"}, "c": {"x"}, "d": {"x"}} == await listed(backend)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError):
            ray.get(producer.read.remote())
        with pytest.raises(QueueError) as caught:
            await until_it_fails(backend, "d", "c", "b")
        assert ("queue.lost", ["c", "b"]) == (caught.value.code, caught.value.found)
        assert {"a": {"x"}, "b": set(), "c": set(), "d": {"x"}} == await listed(backend)
        assert [1.0, 4.0] == await values(backend, "a", "d")  # this column was another's
        await put(backend, {"b": 6.0, "c": 7.0})
        assert [6.0, 7.0] == await values(backend, "b", "c")
        assert [5.0] == await values(alone, "a")


@in_loop
async def test_large_columns_are_shown_where_they_lie() -> None:
    """Two readers see the same memory, which stays as it was while they do, also when the row is replaced."""
    async with opened() as backend:
        await put(backend, {"a": 1.0, "b": 2.0})
        first, second = [(await backend.get(asked("a", "b"))).columns["x"].values for _ in range(2)]
        assert first.data_ptr() == second.data_ptr()
        await put(backend, {"a": 8.0, "b": 9.0})
        assert [1.0, 2.0] == first[:, 0].tolist()
        assert [8.0, 9.0] == await values(backend, "a", "b")


@in_loop
async def test_an_index_that_has_gone_is_named() -> None:
    async with opened(queue="going", seconds=20) as backend:
        await put(backend, {"a": 1.0})
        ray.kill(ray.get_actor("queue going", namespace="jackfield"))
        with refused("queue.unreachable", "going") as caught:
            await until_it_fails(backend, "a")
        assert "queue.unreachable" == caught.value.code
