"""What ``transfer_queue.py`` measures between processes: one batch to another process, and several pairs at once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from _transfer_queue_stores import ROWS, Backend, Store, batch, read

SCRIPT = str(Path(__file__).with_name("transfer_queue.py"))
BATCH_MB = 64  #: of the batch that another process reads
PAIRS, PAIR_MB, AHEAD = 4, 8, 2  #: producers and consumers, a batch of one, and batches that are not consumed yet
WAYS = ("store", "raw")  #: raw: the same processes and turns, with a copy and a read of shared memory and no store
BATCHES = 128  #: of all producers together, in one round
TEXT = (
    "zmq, between processes: {put_mb_per_s:,.0f} MB/s, memcpy {memcpy_mb_per_s:,.0f}, fraction {memcpy_fraction:.2f}\n"
    "zmq, one producer and one consumer: {one_pair_mb_per_s:,.0f} MB/s, four of each at once {mb_per_s:,.0f}, fraction "
    "{fraction:.2f}\n"
    "without a store: {raw_one_pair_mb_per_s:,.0f} MB/s, four of each at once {raw_mb_per_s:,.0f}, fraction "
    "{raw_fraction:.2f}"
)


async def measured(cls: Any, config: Any, folder: str, repeats: int) -> dict[str, Any]:
    """Both, with one storage unit."""
    from jackfield.abc.transfer_queue import TransferQueueContext

    store = cls(config, TransferQueueContext(folder=folder))
    await store.start()
    try:
        alone = await between(store, folder, 5 * repeats)
        return {"between_processes": alone, "clients_at_once": await at_once(folder, repeats)}
    finally:
        await store.close()


async def act(name: str, *words: str) -> None:
    """What another process does."""
    if name == "reader":
        await reader(*words)
    else:
        number, source, target, memory, join = words
        await side(name, number, int(source), int(target), int(memory), join)


@contextlib.contextmanager
def part(*words: object, descriptors: tuple[int, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that does a part, and ends when its standard input does."""
    command = [sys.executable, SCRIPT, "--only", ":".join(map(str, words))]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=descriptors
    ) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.stdout is not None
        process.stdout.read()


async def hear(process: subprocess.Popen[str]) -> str:
    """A line of a process, while the loop goes on."""
    assert process.stdout is not None
    return await asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)


def tell(process: subprocess.Popen[str], word: object) -> None:
    """Write a line to a process."""
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


async def lines() -> Any:
    """The lines of standard input."""
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        yield line.strip()


async def joined(join: str) -> Any:
    """A backend zmq with the units of another process."""
    from jackfield.abc.transfer_queue import TransferQueueContext
    from jackfield.plugins import load_plugin

    store: Any = load_plugin("transfer_queue", "zmq").build({"join": join}, TransferQueueContext())
    await store.start()
    return store


async def between(store: Any, folder: str, repeats: int) -> dict[str, float]:
    """64 MB from a put here until another process has them, and memcpy, in turns: medians."""
    values, queue = batch(BATCH_MB), Backend(store)
    expected, moved, copied = read(values), list[float](), list[float]()
    target = values.clone()
    with part("reader", f"{folder}/units.json") as process:
        assert process.stdout is not None
        for repeat in range(2 + repeats):
            keys = [f"between-{repeat}-{row}" for row in range(ROWS)]
            put = queue.request(keys, {"x": values})
            began = time.perf_counter()
            target.copy_(values)
            copied.append(time.perf_counter() - began)
            await hear(process)  # it is there, and has let go of the batch before
            began = time.perf_counter()
            await queue.put(put)
            tell(process, repeat)
            process.stdout.readline()
            moved.append(time.perf_counter() - began)
            assert expected == int(process.stdout.readline()), "other bytes came to the other process"
            await queue.delete(keys)
    put_rate, copy_rate = (values.nbytes / 1e6 / statistics.median(each[2:]) for each in (moved, copied))
    return {"put_mb_per_s": put_rate, "memcpy_mb_per_s": copy_rate, "memcpy_fraction": put_rate / copy_rate}


async def reader(join: str) -> None:
    """Read a batch when the first process asks for it, in a second process; report that, then the sum of its bytes."""
    store = await joined(join)
    queue = Backend(store)
    print("ready", flush=True)
    async for number in lines():
        found = await queue.get([f"between-{number}-{row}" for row in range(ROWS)], ("x",))
        print("there", flush=True)
        print(read(found), flush=True)
        del found
        await asyncio.sleep(0)  # the block is given back on the loop
        print("gone", flush=True)
    await store.close()


async def at_once(folder: str, repeats: int) -> dict[str, float]:
    """MB/s that all consumers together have read, of one producer and one consumer, and of four of each, in turns.

    Three batches and the producer's own fit into a large cache, and those of four pairs do not. What the machine loses
    by that is measured without a store, by the same processes.
    """
    join, rates = f"{folder}/units.json", {(way, pairs): list[float]() for way in WAYS for pairs in (1, PAIRS)}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(PAIRS):
            (there, put), (back, taken), memory = os.pipe(), os.pipe(), os.memfd_create("raw")
            os.ftruncate(memory, (AHEAD + 1) * batch(PAIR_MB).nbytes)
            for role, *ends in (("producer", back, put, memory), ("consumer", there, taken, memory)):
                processes.append(stack.enter_context(part(role, number, *ends, join, descriptors=tuple(ends))))
            for descriptor in (there, put, back, taken, memory):
                os.close(descriptor)
        for process in processes:
            await hear(process)
        for repeat in range(1 + repeats):
            for way, pairs in rates:
                began = time.perf_counter()
                for process in processes[: 2 * pairs]:
                    tell(process, f"{way} {BATCHES // pairs}")
                for process in processes[: 2 * pairs]:
                    await hear(process)
                if repeat:
                    rates[way, pairs].append(BATCHES * PAIR_MB / (time.perf_counter() - began))
    alone, together, raw_alone, raw_together = (statistics.median(each) for each in rates.values())
    return {
        **{"one_pair_mb_per_s": alone, "mb_per_s": together, "fraction": together / alone},
        **{"raw_one_pair_mb_per_s": raw_alone, "raw_mb_per_s": raw_together, "raw_fraction": raw_together / raw_alone},
    }


class Copies:
    """Shared memory of one pair, in which batches have their places in turns."""

    def __init__(self, descriptor: int) -> None:
        import torch

        memory = mmap.mmap(descriptor, 0)
        self._places = itertools.cycle(torch.frombuffer(memory, dtype=torch.float32).reshape(AHEAD + 1, ROWS, -1))

    def request(self, keys: Sequence[str], columns: Mapping[str, Any]) -> Any:
        return columns["x"]

    async def put(self, values: Any) -> None:
        next(self._places).copy_(values)

    async def get(self, keys: Sequence[str], names: Sequence[str]) -> Any:
        return next(self._places)

    async def delete(self, keys: Sequence[str]) -> None:
        pass


async def side(role: str, number: str, source: int, target: int, memory: int, join: str) -> None:
    """A producer, or the consumer of what it puts; each tells the other of every batch by a byte."""
    store = await joined(join)
    steps, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(steps), os.fdopen(source, "rb"))
    queues: dict[str, Store] = {"store": Backend(store), "raw": Copies(memory)}
    values = batch(PAIR_MB)
    act = produce if role == "producer" else consume
    print("ready", flush=True)
    async for line in lines():
        way, count = line.split()
        keys = [[f"{number}-{step}-{row}" for row in range(ROWS)] for step in range(int(count))]
        await act(queues[way], keys, values, steps, target)
        print("done", flush=True)
    await store.close()


async def produce(queue: Store, batches: list[list[str]], values: Any, steps: Any, target: int) -> None:
    """Put each batch, two ahead of the consumer."""
    for step, keys in enumerate(batches):
        if step >= AHEAD:
            await steps.readexactly(1)
        await queue.put(queue.request(keys, {"x": values}))
        os.write(target, b"x")
    await steps.readexactly(min(AHEAD, len(batches)))


async def consume(queue: Store, batches: list[list[str]], values: Any, steps: Any, target: int) -> None:
    """Get, read and delete each batch."""
    expected = read(values)
    for keys in batches:
        await steps.readexactly(1)
        found = await queue.get(keys, ("x",))
        assert expected == read(found), "other bytes came to a consumer"
        del found
        await queue.delete(keys)
        os.write(target, b"x")
