"""Queue backends: put and get in MB/s, small rows in milliseconds, and what the controller costs per row.

    python benchmarks/transfer_queue.py [--sizes 1 64 512] [--backends memory sql ...] [--quick] [--json]

Each backend that is installed is measured in this process: a batch of 64 rows of float32 is put, got and deleted, under
new keys each time; the median counts, after a first time that touches the memory. A get ends when the consumer has read
every byte and the sum is right. The backend zmq is measured between processes, too: from the beginning of a put until a
second process, which is then told, has got the batch (both messages, through pipes, included); a memcpy takes turns.
Beside them: a memcpy of the same bytes into memory that was touched before, Ray's object store alone (an object for a
batch), and the PyPI package TransferQueue 0.1.11, where it is installed (make benchmark-transfer-queue). PostgreSQL and
Redis are started for the benchmark on loopback, PostgreSQL without fsync.

The controller is measured over a backend that keeps nothing: rows are put until all are there, then leased, acked and
committed; microseconds of processor time per row, and the growth of the process in bytes per row. ``--plot FILE`` draws
both over the number of rows.

The last line is a JSON object (``--json``: nothing else). Ratios are those of the backend zmq to TransferQueue at 64
MB. What could not be measured is null, and ``reasons`` says why. Exit status 2 where TransferQueue could not be
measured. ``--quick`` takes memory, zmq and TransferQueue, 1 and 64 MB and two repetitions: under 50 s on a quiet
machine. All with one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
sys.path[:] = [path for path in sys.path if Path(path).resolve() != FOLDER]  # the peer's module is named as this file
sys.path.insert(0, str(FOLDER.parent / "tools" / "testing"))

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a copy by several threads waits for the slowest

ROWS = 64
PEER = "TransferQueue 0.1.11"
RAY = "Ray's object store"
PEER_SECONDS, QUICK_PEER_SECONDS = 240.0, 40.0
PEER_PYTHON = str(FOLDER.parent / ".venv-transfer-queue" / "bin" / "python")  #: made by make benchmark-transfer-queue
HEADLINE_MB = 64


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", metavar="MB", help="default: 1 64 512")
    parser.add_argument("--backends", nargs="+", help="default: all that are there")
    parser.add_argument("--controller-rows", type=int, nargs="*", metavar="N", help="default: 1000 10000 100000")
    parser.add_argument("--plot", metavar="FILE", help="a PNG of the controller's cost per row")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller")
    parser.add_argument("--json", action="store_true", help="only the last line")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.backends = arguments.backends or ["memory", "zmq", PEER]
    arguments.sizes = arguments.sizes or ([1, 64] if arguments.quick else [1, 64, 512])
    if arguments.controller_rows is None:
        arguments.controller_rows = [1_000, 8_000] if arguments.quick else [1_000, 10_000, 100_000]
    if arguments.only:
        print(json.dumps(only(arguments.only, arguments)))
        return
    say = (lambda *_: None) if arguments.json else print
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    found, reasons = measure(arguments, say)
    if arguments.plot:
        plot(found["controller"], arguments.plot)
    summary = headline(found, reasons) | {"machine": platform.platform(), "cores": os.cpu_count(), **found}
    print(json.dumps(summary))
    if PEER in reasons:
        sys.exit(2)


def measure(arguments: argparse.Namespace, say: Any) -> tuple[dict[str, Any], dict[str, str]]:
    """Everything that can be, and why the rest cannot."""
    reasons: dict[str, str] = {}
    repeats = 2 if arguments.quick else 5
    found: dict[str, Any] = {"memcpy": {str(size): memcpy(size) for size in arguments.sizes}, "backends": {}}
    say(f"{'':24}" + "".join(f"{f'{size} MB: put':>14}{'get':>8}" for size in arguments.sizes) + "   small put, get ms")
    say(f"{'memcpy':24}" + "".join(f"{found['memcpy'][str(size)]:14,.0f}{'':8}" for size in arguments.sizes))
    with backends(reasons) as there:
        for name, (cls, config) in there.items():
            if arguments.backends and name not in arguments.backends:
                continue
            with tempfile.TemporaryDirectory() as folder:
                found["backends"][name] = asyncio.run(backend(cls, config, folder, arguments.sizes, repeats))
            say(line(name, found["backends"][name], arguments.sizes))
            if name == "zmq" and HEADLINE_MB in arguments.sizes:
                with tempfile.TemporaryDirectory() as folder:
                    found["between_processes"] = asyncio.run(between(cls, config, folder, 5 * repeats))
                say(
                    "zmq, between processes: {put_mb_per_s:,.0f} MB/s, memcpy {memcpy_mb_per_s:,.0f}, fraction "
                    "{memcpy_fraction:.2f}".format(**found["between_processes"])
                )
    if not arguments.backends or "ray" in arguments.backends:
        one = in_a_process_of_its_own("ray", 120.0)
        if "reason" in one:
            reasons[RAY] = one["reason"]
        else:
            found["backends"][RAY] = one
            say(line(RAY, one, arguments.sizes))
    if not arguments.backends or PEER in arguments.backends:
        python = PEER_PYTHON if Path(PEER_PYTHON).exists() else sys.executable
        peer = in_a_process_of_its_own("peer", QUICK_PEER_SECONDS if arguments.quick else PEER_SECONDS, python)
        if "reason" in peer:
            reasons[PEER] = peer["reason"]
        else:
            found["backends"][PEER] = peer
            say(line(PEER, peer, arguments.sizes))
    found["controller"] = []
    for rows in arguments.controller_rows:
        one = in_a_process_of_its_own(f"controller:{rows}", 1800.0)
        if "reason" in one:
            reasons[f"controller, {rows} rows"] = one["reason"]
            continue
        found["controller"].append(one)
        costs = f"put {one['put_us']:.0f}, lease, ack and commit {one['consume_us']:.0f} µs per row"
        say(f"controller, {rows:>9,} rows: {costs}; {one['bytes_per_row']:,.0f} bytes per row")
    for name, reason in reasons.items():
        say(f"not measured: {name}: {reason}")
    return found, reasons


def headline(found: dict[str, Any], reasons: dict[str, str]) -> dict[str, Any]:
    """The figures that are followed over time."""
    ours, peer = found["backends"].get("zmq"), found["backends"].get(PEER)
    if ours is None:
        reasons["zmq"] = "the backend zmq is not installed"
    size = str(HEADLINE_MB)
    both = ours is not None and peer is not None and size in ours["put"] and size in peer["put"]
    largest = max(found["controller"], key=lambda one: one["rows"], default=None)
    return {
        "put_ratio": ours["put"][size] / peer["put"][size] if both else None,
        "get_ratio": ours["get"][size] / peer["get"][size] if both else None,
        "memcpy_fraction": found.get("between_processes", {}).get("memcpy_fraction"),
        "small_put_p50_ms": None if ours is None else ours["small_put_p50_ms"],
        "bytes_per_row": None if largest is None else largest["bytes_per_row"],
        "reasons": reasons,
    }


def line(name: str, one: dict[str, Any], sizes: list[int]) -> str:
    """A row of the table."""
    rates = "".join(f"{one['put'][str(size)]:14,.0f}{one['get'][str(size)]:8,.0f}" for size in sizes)
    return f"{name:24}{rates}   {one['small_put_p50_ms']:.2f}, {one['small_get_p50_ms']:.2f}"


def only(part: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """A part that needs a process of its own."""
    if part == "peer":
        return peer(arguments.sizes, 2 if arguments.quick else 5)
    if part == "ray":
        return object_store(arguments.sizes, 2 if arguments.quick else 5)
    if part.startswith("reader:"):
        return asyncio.run(reader(part.partition(":")[2]))
    return asyncio.run(controller(int(part.partition(":")[2])))


def in_a_process_of_its_own(part: str, seconds: float, python: str = sys.executable) -> dict[str, Any]:
    """What it prints last, or ``reason``; it and all that it started are ended after ``seconds``."""
    command = [python, __file__, *sys.argv[1:], "--only", part]
    with tempfile.TemporaryDirectory() as home:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "HOME": home},
            start_new_session=True,
        )
        try:
            output, errors = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return {"reason": f"it did not end within {seconds:g} s"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if process.returncode:
        return {"reason": (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]}
    result: dict[str, Any] = json.loads(output.strip().splitlines()[-1])
    return result


# -- values ------------------------------------------------------------------------------------------------------------


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


def rates(sizes: dict[str, int], seconds: dict[str, list[float]]) -> dict[str, float]:
    """MB/s by size."""
    return {size: sizes[size] / 1e6 / statistics.median(each) for size, each in seconds.items()}


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


async def backend(cls: Any, config: Any, folder: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Rates by size, and the median of small requests."""
    import torch

    from jackfield.abc.transfer_queue import (
        Column,
        DeleteRequest,
        GetRequest,
        PutRequest,
        TransferQueueContext,
    )

    store = cls(config, TransferQueueContext(folder=folder))
    await store.start()
    puts: dict[str, list[float]] = {str(size): [] for size in sizes}
    gets: dict[str, list[float]] = {str(size): [] for size in sizes}
    bytes_of: dict[str, int] = {}
    for size in sizes:
        values = batch(size)
        bytes_of[str(size)], expected = values.nbytes, read(values)
        for repeat in range(1 + repeats):
            keys = tuple(f"{size}-{repeat}-{row}" for row in range(ROWS))
            put = PutRequest(partition="p", keys=keys, columns={"x": Column(values=values)})
            began = time.perf_counter()
            await store.put(put)
            took = time.perf_counter() - began
            began = time.perf_counter()
            found = await store.get(GetRequest(partition="p", keys=keys, columns=("x",)))
            total = read(found.columns["x"].values)
            if repeat:
                puts[str(size)].append(took)
                gets[str(size)].append(time.perf_counter() - began)
            assert expected == total, "other bytes came back"
            del found
            await store.delete(DeleteRequest(partition="p", keys=keys))
    small = {"x": Column(values=torch.zeros(1, 32)), "reward": Column(values=torch.zeros(1))}
    small_puts, small_gets = [], []
    for row in range(100 * repeats):
        began = time.perf_counter()
        await store.put(PutRequest(partition="p", keys=(f"s-{row}",), columns=small))
        small_puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        await store.get(GetRequest(partition="p", keys=(f"s-{row}",), columns=("x", "reward")))
        small_gets.append(time.perf_counter() - began)
    await store.close()
    return {
        "put": rates(bytes_of, puts),
        "get": rates(bytes_of, gets),
        "small_put_p50_ms": statistics.median(small_puts) * 1e3,
        "small_get_p50_ms": statistics.median(small_gets) * 1e3,
    }


def object_store(sizes: list[int], repeats: int) -> dict[str, Any]:
    """The same with Ray alone: one object for a batch, and one for a small row."""
    import ray

    own: dict[str, Any] = {
        "num_cpus": 1,
        "include_dashboard": False,
        "log_to_driver": False,
        "configure_logging": False,
    }
    ray.init(address="local", _node_ip_address="127.0.0.2", **own)
    puts: dict[str, list[float]] = {str(size): [] for size in sizes}
    gets: dict[str, list[float]] = {str(size): [] for size in sizes}
    bytes_of: dict[str, int] = {}
    for size in sizes:
        values = batch(size).numpy()
        bytes_of[str(size)], expected = values.nbytes, int(values.view("int64").sum())
        for repeat in range(1 + repeats):
            began = time.perf_counter()
            reference = ray.put(values)
            took = time.perf_counter() - began
            began = time.perf_counter()
            found = ray.get(reference)
            total = int(found.view("int64").sum())
            if repeat:
                puts[str(size)].append(took)
                gets[str(size)].append(time.perf_counter() - began)
            assert expected == total, "other bytes came back"
            del found, reference
    small_puts, small_gets = [], []
    small = batch(1).numpy()[0, :32]
    for _ in range(100 * repeats):
        began = time.perf_counter()
        reference = ray.put([small, small[:1]])
        small_puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        ray.get(reference)
        small_gets.append(time.perf_counter() - began)
    ray.shutdown()
    return {
        "put": rates(bytes_of, puts),
        "get": rates(bytes_of, gets),
        "small_put_p50_ms": statistics.median(small_puts) * 1e3,
        "small_get_p50_ms": statistics.median(small_gets) * 1e3,
    }


async def between(cls: Any, config: Any, folder: str, repeats: int) -> dict[str, float]:
    """64 MB from a put here until another process has them, and memcpy, in turns: medians."""
    from jackfield.abc.transfer_queue import Column, DeleteRequest, PutRequest, TransferQueueContext

    store = cls(config, TransferQueueContext(folder=folder))
    await store.start()
    values = batch(HEADLINE_MB)
    expected, moved, copied = read(values), [], []
    target = values.clone()
    command = [sys.executable, __file__, "--only", f"reader:{folder}/units.json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        for repeat in range(2 + repeats):
            keys = tuple(f"between-{repeat}-{row}" for row in range(ROWS))
            put = PutRequest(partition="p", keys=keys, columns={"x": Column(values=values)})
            began = time.perf_counter()
            target.copy_(values)
            copied.append(time.perf_counter() - began)
            if repeat:
                await loop.run_in_executor(None, process.stdout.readline)  # it has let go of the batch before
            began = time.perf_counter()
            await store.put(put)
            process.stdin.write(f"{repeat}\n")
            process.stdin.flush()
            process.stdout.readline()
            moved.append(time.perf_counter() - began)
            total = int(process.stdout.readline())
            assert expected == total, "other bytes came to the other process"
            await store.delete(DeleteRequest(partition="p", keys=keys))
        process.stdin.close()
        process.stdout.read()
    await store.close()
    put_rate, copy_rate = (values.nbytes / 1e6 / statistics.median(each[2:]) for each in (moved, copied))
    return {"put_mb_per_s": put_rate, "memcpy_mb_per_s": copy_rate, "memcpy_fraction": put_rate / copy_rate}


async def reader(join: str) -> dict[str, Any]:
    """Read a batch when the first process asks for it, in a second process; report that, then the sum of its bytes."""
    from jackfield.abc.transfer_queue import GetRequest, TransferQueueContext
    from jackfield.plugins import load_plugin

    store: Any = load_plugin("transfer_queue", "zmq").build({"join": join}, TransferQueueContext())
    await store.start()
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        keys = tuple(f"between-{line.strip()}-{row}" for row in range(ROWS))
        found = await store.get(GetRequest(partition="p", keys=keys, columns=("x",)))
        print("there", flush=True)
        print(read(found.columns["x"].values), flush=True)
        del found
        await asyncio.sleep(0)  # the block is given back on the loop
        print("gone", flush=True)
    await store.close()
    return {}


def peer(sizes: list[int], repeats: int) -> dict[str, Any]:
    """TransferQueue 0.1.11 with its own defaults, on a Ray that believes in eight cores: on two it hangs."""
    for module in ("transfer_queue", "ray", "tensordict"):
        if find_spec(module) is None:
            return {"reason": f"{module} is not installed (make benchmark-transfer-queue)"}
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    import torch
    from tensordict import TensorDict

    tq: Any = import_module("transfer_queue")

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False)
    tq.init()
    puts: dict[str, list[float]] = {str(size): [] for size in sizes}
    gets: dict[str, list[float]] = {str(size): [] for size in sizes}
    bytes_of: dict[str, int] = {}
    for size in sizes:
        values = batch(size)
        bytes_of[str(size)], expected = values.nbytes, read(values)
        for repeat in range(1 + repeats):
            keys = [f"{size}-{repeat}-{row}" for row in range(ROWS)]
            fields = TensorDict({"x": values}, batch_size=ROWS)
            began = time.perf_counter()
            tq.kv_batch_put(keys=keys, partition_id="p", fields=fields)
            took = time.perf_counter() - began
            began = time.perf_counter()
            total = read(tq.kv_batch_get(keys=keys, partition_id="p")["x"])
            if repeat:
                puts[str(size)].append(took)
                gets[str(size)].append(time.perf_counter() - began)
            assert expected == total, "other bytes came back"
            tq.kv_clear(keys=keys, partition_id="p")
    small_puts, small_gets = [], []
    for row in range(30 * repeats):
        fields = TensorDict({"x": torch.zeros(1, 32), "reward": torch.zeros(1)}, batch_size=1)
        began = time.perf_counter()
        tq.kv_batch_put(keys=[f"s-{row}"], partition_id="p", fields=fields)
        small_puts.append(time.perf_counter() - began)
        began = time.perf_counter()
        tq.kv_batch_get(keys=[f"s-{row}"], partition_id="p")
        small_gets.append(time.perf_counter() - began)
    result = {
        "put": rates(bytes_of, puts),
        "get": rates(bytes_of, gets),
        "small_put_p50_ms": statistics.median(small_puts) * 1e3,
        "small_get_p50_ms": statistics.median(small_gets) * 1e3,
    }
    tq.close()
    ray.shutdown()
    return result


# -- controller --------------------------------------------------------------------------------------------------------


async def controller(rows: int) -> dict[str, Any]:
    """Microseconds and bytes per row: groups of 8 rows, batches of 32 groups, tags as the trainer writes them."""
    import torch

    from jackfield.abc.transfer_queue import Column, DeleteResult, PutResult, TransferQueueContext
    from jackfield.clock import Clock
    from jackfield.queue import TransferQueue, Values
    from jackfield.queue.meta import GroupKey, NewGroup, RolloutReport
    from jackfield.queue.values import MemoryBackend, MemoryConfig

    class Nothing(MemoryBackend):
        """A backend that stores no values."""

        async def put(self, request: Any) -> PutResult:
            return PutResult(bytes=0)

        async def delete(self, request: Any) -> DeleteResult:
            return DeleteResult(samples=0, bytes=0)

    backend = Nothing(MemoryConfig(), TransferQueueContext())
    queue, values = TransferQueue(backend, Clock()), Values(backend)
    await queue.start()
    await queue.register_consumer("trainer", partition="train", columns=("ids",))
    columns = {"ids": Column(values=torch.zeros(1, 8))}

    async def rollout(values: Values, key: GroupKey, number: int, columns: dict[str, Column]) -> RolloutReport:
        tags = {"prompt_tokens": 100, "response_tokens": 200 + number}
        name = key.sample(number, 0)
        written = await values.put("train", [name], columns, [tags])
        return RolloutReport(group=str(key), rollout=number, keys=(name,), written=written)

    batches, before = max(1, rows // 256), resident_bytes()
    began = time.process_time()
    for number in range(batches):
        batch = await queue.claim_batch("train", "e", 32, rollouts=8)
        assert batch is not None
        groups = queue.groups_to_fill(batch, 1.0)
        keys = await anext(groups)
        await queue.open_groups([NewGroup(key=key, task_id=f"task-{number}", rollouts=8) for key in keys])
        for key in keys:
            await queue.end_rollouts([await rollout(values, key, number, columns) for number in range(8)])
        await groups.aclose()  # type: ignore[attr-defined]
    put, grown = time.process_time() - began, resident_bytes() - before
    began = time.process_time()
    for number in range(batches):
        leased = await queue.lease("trainer", batch=number, deadline_seconds=1.0)
        await queue.ack(leased, step=number)
        await queue.commit(number)
    consume = time.process_time() - began
    await queue.close()
    count = batches * 256
    return {
        "rows": count,
        "put_us": put / count * 1e6,
        "consume_us": consume / count * 1e6,
        "bytes_per_row": grown / count,
    }


def plot(costs: list[dict[str, Any]], file: str) -> None:
    """Draw what a row costs over the number of rows; lines that stay flat are what is aimed at."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [one["rows"] for one in costs]
    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label in (("put_us", "put"), ("consume_us", "lease, ack and commit")):
        time_axes.plot(rows, [one[name] for one in costs], marker="o", label=label)
    time_axes.set_ylabel("processor time per row, µs")
    time_axes.legend()
    memory_axes.plot(rows, [one["bytes_per_row"] for one in costs], marker="o", color="C2")
    memory_axes.axhline(1000, color="grey", linestyle="--", label="1 GB for a million rows")
    memory_axes.set_ylabel("memory per row, bytes")
    memory_axes.legend()
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log")
        axes.set_xlabel("rows in the queue")
        axes.set_ylim(bottom=0)
    figure.savefig(file, dpi=130)


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
