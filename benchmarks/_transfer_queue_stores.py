"""What ``transfer_queue.py`` measures in one process: each backend, Ray's object store and TransferQueue, all alike."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

ROWS = 64
MANY = 1024  #: short samples of one call
LENGTH = 50  #: tokens of one, about
MANY_TEXT = (
    f"{'':24}{MANY:,} short samples, µs per sample: put {{many_put_us_per_sample:.1f}}, get "
    "{many_get_us_per_sample:.1f}, delete {many_delete_us_per_sample:.1f}"
)


def batch(megabytes: int) -> Any:
    """``[64, …]`` float32 of so many MB, all different."""
    import torch

    width = megabytes * 1_000_000 // ROWS // 4 // 2 * 2
    return torch.arange(ROWS * width, dtype=torch.float32).reshape(ROWS, width)


def read(values: Any) -> int:
    """Read every byte."""
    import torch

    flat = values.values() if values.is_nested else values
    return int(flat.contiguous().reshape(-1).view(torch.int64).sum())


def memcpy(megabytes: int) -> float:
    """MB/s into memory that was touched before."""
    import torch

    source = batch(megabytes)
    target = torch.empty_like(source).fill_(1.0)
    seconds: list[float] = []
    for _ in range(9):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return float(source.nbytes / 1e6 / statistics.median(seconds))


class Store(Protocol):
    """What is measured. A request is made before the clock starts."""

    def request(self, keys: Sequence[str], columns: Mapping[str, Any]) -> Any: ...
    async def put(self, request: Any) -> None: ...
    async def get(self, keys: Sequence[str], names: Sequence[str]) -> Any: ...  # the values of the first column
    async def delete(self, keys: Sequence[str]) -> None: ...


class Backend:
    """A backend of Jackfield's."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def request(self, keys: Sequence[str], columns: Mapping[str, Any]) -> Any:
        from jackfield.abc.transfer_queue import Column, PutRequest

        made = {name: Column(values=values) for name, values in columns.items()}
        return PutRequest(partition="p", keys=tuple(keys), columns=made)

    async def put(self, request: Any) -> None:
        await self._backend.put(request)

    async def get(self, keys: Sequence[str], names: Sequence[str]) -> Any:
        from jackfield.abc.transfer_queue import GetRequest

        found = await self._backend.get(GetRequest(partition="p", keys=tuple(keys), columns=tuple(names)))
        return found.columns[names[0]].values

    async def delete(self, keys: Sequence[str]) -> None:
        from jackfield.abc.transfer_queue import DeleteRequest

        await self._backend.delete(DeleteRequest(partition="p", keys=tuple(keys)))


class Objects:
    """Ray's object store: one object for a batch, and one for a small row."""

    def __init__(self, ray: Any) -> None:
        self._ray, self._reference = ray, None

    def request(self, keys: Sequence[str], columns: Mapping[str, Any]) -> Any:
        return [values.numpy() for values in columns.values()]

    async def put(self, request: Any) -> None:
        self._reference = self._ray.put(request)

    async def get(self, keys: Sequence[str], names: Sequence[str]) -> Any:
        import warnings

        import torch

        with warnings.catch_warnings(action="ignore"):  # its arrays cannot be written to
            return torch.from_numpy(self._ray.get(self._reference)[0])

    async def delete(self, keys: Sequence[str]) -> None:
        self._reference = None


class Peer:
    """Puts, gets and deletes by the package TransferQueue."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def request(self, keys: Sequence[str], columns: Mapping[str, Any]) -> Any:
        from tensordict import TensorDict

        return list(keys), TensorDict(dict(columns), batch_size=len(keys))

    async def put(self, request: Any) -> None:
        keys, fields = request
        self._module.kv_batch_put(keys=keys, partition_id="p", fields=fields)

    async def get(self, keys: Sequence[str], names: Sequence[str]) -> Any:
        return self._module.kv_batch_get(keys=list(keys), partition_id="p")[names[0]]

    async def delete(self, keys: Sequence[str]) -> None:
        self._module.kv_clear(keys=list(keys), partition_id="p")


async def measured(store: Store, sizes: Sequence[int], repeats: int, small_rows: int) -> dict[str, Any]:
    """MB/s by size, and milliseconds of small rows."""
    import torch

    rates: dict[str, dict[str, float]] = {"put": {}, "get": {}}
    for size in sizes:
        values = batch(size)
        expected, puts, gets = read(values), list[float](), list[float]()
        for repeat in range(1 + repeats):
            keys = [f"{size}-{repeat}-{row}" for row in range(ROWS)]
            request = store.request(keys, {"x": values})
            began = time.perf_counter()
            await store.put(request)
            took = time.perf_counter() - began
            began = time.perf_counter()
            found = await store.get(keys, ("x",))
            total = read(found)
            if repeat:
                puts.append(took)
                gets.append(time.perf_counter() - began)
            assert expected == total, "other bytes came back"
            del found
            await store.delete(keys)
        for kind, seconds in (("put", puts), ("get", gets)):
            rates[kind][str(size)] = values.nbytes / 1e6 / statistics.median(seconds)
    small: dict[str, list[float]] = {"put": [], "get": []}
    for row in range(small_rows):
        request = store.request([f"s-{row}"], {"x": torch.zeros(1, 32), "reward": torch.zeros(1)})
        began = time.perf_counter()
        await store.put(request)
        small["put"].append((time.perf_counter() - began) * 1e3)
        began = time.perf_counter()
        await store.get([f"s-{row}"], ("x", "reward"))
        small["get"].append((time.perf_counter() - began) * 1e3)
    latencies = {f"small_{kind}_p50_ms": statistics.median(each) for kind, each in small.items()}
    latencies |= {f"small_{kind}_p99_ms": sorted(each)[int(len(each) * 0.99)] for kind, each in small.items()}
    return {**rates, **latencies}


async def many(backend: Any, repeats: int) -> dict[str, float]:
    """Microseconds per sample of a call with 1,024 samples of 5 short jagged columns, with the check of columns."""
    import torch

    from jackfield.abc.transfer_queue import DeleteRequest
    from jackfield.queue import Values
    from jackfield.sdk.cells import column_from_rows, json_column

    lengths = [LENGTH // 2 + number * 37 % LENGTH for number in range(MANY)]
    tokens = column_from_rows([torch.arange(length) for length in lengths])
    columns = {
        "prompt_ids": tokens,
        "response_ids": tokens,
        "response_mask": column_from_rows([torch.ones(length, dtype=torch.bool) for length in lengths]),
        "rollout_log_probs": column_from_rows([torch.ones(length) for length in lengths]),
        "task": json_column([{"data_source": "arithmetic", "ground_truth": str(length)} for length in lengths]),
    }
    values, puts, gets, deletes = Values(backend), list[float](), list[float](), list[float]()
    for repeat in range(1 + 10 * repeats):
        keys = [f"train/{repeat}/{row // 8}/0/{row % 8}/0" for row in range(MANY)]
        marks = [time.perf_counter()]
        await values.put("p", keys, columns)
        marks.append(time.perf_counter())
        found = await values.get("p", keys, tuple(columns))
        marks.append(time.perf_counter())
        assert torch.equal(tokens.values, found["response_ids"].values)
        del found
        marks.append(time.perf_counter())
        await backend.delete(DeleteRequest(partition="p", keys=tuple(keys)))
        if repeat:
            puts.append(marks[1] - marks[0])
            gets.append(marks[2] - marks[1])
            deletes.append(time.perf_counter() - marks[3])
    named = (("put", puts), ("get", gets), ("delete", deletes))
    return {f"many_{name}_us_per_sample": statistics.median(each) / MANY * 1e6 for name, each in named}


async def backend(cls: Any, config: Any, folder: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Everything of one backend."""
    from jackfield.abc.transfer_queue import TransferQueueContext

    store = cls(config, TransferQueueContext(folder=folder))
    await store.start()
    try:
        return {**await measured(Backend(store), sizes, repeats, 250 * repeats), **await many(store, repeats)}
    finally:
        await store.close()


async def object_store(sizes: list[int], repeats: int) -> dict[str, Any]:
    """Measure Ray's object store alone, by size in MB."""
    import ray

    own: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}
    own |= {"log_to_driver": False, "configure_logging": False}
    ray.init(address="local", _node_ip_address="127.0.0.2", **own)
    try:
        return await measured(Objects(ray), sizes, repeats, 100 * repeats)
    finally:
        ray.shutdown()


async def peer(sizes: list[int], repeats: int) -> dict[str, Any]:
    """TransferQueue 0.1.11 with its own defaults, on a Ray that believes in eight cores: on two it hangs."""
    for module in ("transfer_queue", "ray", "tensordict"):
        if find_spec(module) is None:
            return {"reason": f"{module} is not installed (make benchmark-transfer-queue)"}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray

    tq: Any = import_module("transfer_queue")
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    try:
        return await measured(Peer(tq), sizes, repeats, 30 * repeats)
    finally:
        tq.close()
        ray.shutdown()


def registered() -> list[str]:
    """Names of the backends that are installed."""
    from jackfield.plugins import discover

    return [record.name for record in discover().records("transfer_queue")]


@contextlib.contextmanager
def backends(reasons: dict[str, str]) -> Iterator[dict[str, tuple[Any, Any]]]:
    """Name to class and settings of what is installed, with the servers that they need."""
    from jackfield.plugins import discover
    from jackfield_servers import PostgresServer, RedisServer, postgres_programs, redis_program

    registry = discover()
    there: dict[str, tuple[Any, Any]] = {}
    with contextlib.ExitStack() as stack:
        for record in registry.records("transfer_queue"):
            if record.error is not None:
                continue
            loaded = registry.load("transfer_queue", record.name)
            if record.name == "redis":
                if redis_program() is None:
                    reasons["redis"] = "redis-server is not installed"
                    continue
                redis = stack.enter_context(contextlib.closing(RedisServer()))
                redis.start()
                there["redis"] = loaded.cls, loaded.settings_class(url=redis.url)
                continue
            there[record.name] = loaded.cls, loaded.settings_class()
            if record.name == "sql":
                if postgres_programs() is None:
                    reasons["sql, PostgreSQL"] = "PostgreSQL is not installed"
                    continue
                postgres = stack.enter_context(contextlib.closing(PostgresServer()))
                postgres.start()
                there["sql, PostgreSQL"] = loaded.cls, loaded.settings_class(url=postgres.url)
        yield there
