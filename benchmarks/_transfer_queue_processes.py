"""What ``transfer_queue.py`` measures between processes: one batch to another process, and several pairs at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _transfer_queue_stores import ROWS, Backend, batch, read

SCRIPT = str(Path(__file__).with_name("transfer_queue.py"))
BATCH_MB = 64  #: of the batch that another process reads
PAIRS, PAIR_MB, AHEAD = 4, 8, 2  #: producers and consumers, a batch of one, and batches that are not consumed yet
#: pairs, and the pairs whose batches one of them has in flight: one, four, and one with the batches of four
SETTINGS = ((1, 1), (PAIRS, 1), (1, PAIRS))
BATCHES = 128  #: of all producers together, in one round
TEXT = (
    "zmq, between processes: {put_mb_per_s:,.0f} MB/s, memcpy {memcpy_mb_per_s:,.0f}, fraction {memcpy_fraction:.2f}\n"
    "zmq, one producer and one consumer: {one_pair_mb_per_s:,.0f} MB/s, four of each at once {mb_per_s:,.0f}, fraction "
    "{fraction:.2f}; one with the batches of four {spread_pair_mb_per_s:,.0f}, fraction {fraction_of_spread:.2f}"
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
        number, source, target, join = words
        await side(name, number, int(source), int(target), join)


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

    Three batches and the producer's own fit into a large cache, and those of four pairs do not. So one pair takes its
    turn with as many batches between put and read as four pairs have: what is left are the costs of four pairs at once.
    """
    join, rates = f"{folder}/units.json", {setting: list[float]() for setting in SETTINGS}
    with contextlib.ExitStack() as stack:
        processes = []
        for number in range(PAIRS):
            (there, put), (back, taken) = os.pipe(), os.pipe()
            for role, source, target in (("producer", back, put), ("consumer", there, taken)):
                started = part(role, number, source, target, join, descriptors=(source, target))
                processes.append(stack.enter_context(started))
            for descriptor in (there, put, back, taken):
                os.close(descriptor)
        for process in processes:
            await hear(process)
        for repeat in range(1 + repeats):
            for pairs, spread in rates:
                began = time.perf_counter()
                for process in processes[: 2 * pairs]:
                    tell(process, f"{BATCHES // pairs} {spread}")
                for process in processes[: 2 * pairs]:
                    await hear(process)
                if repeat:
                    rates[pairs, spread].append(BATCHES * PAIR_MB / (time.perf_counter() - began))
    alone, together, spread = (statistics.median(each) for each in rates.values())
    fractions = {"fraction": together / alone, "fraction_of_spread": together / spread}
    return {"one_pair_mb_per_s": alone, "mb_per_s": together, "spread_pair_mb_per_s": spread, **fractions}


async def side(role: str, number: str, source: int, target: int, join: str) -> None:
    """A producer, or the consumer of what it puts; each tells the other of every batch by a byte."""
    store = await joined(join)
    steps, loop = asyncio.StreamReader(), asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(steps), os.fdopen(source, "rb"))
    values = [batch(PAIR_MB) for _ in range(PAIRS)]
    act = produce if role == "producer" else consume
    print("ready", flush=True)
    async for line in lines():
        count, spread = map(int, line.split())
        keys = [[f"{number}-{step}-{row}" for row in range(ROWS)] for step in range(count)]
        await act(Backend(store), keys, values[:spread], steps, target)
        print("done", flush=True)
    await store.close()


async def produce(queue: Backend, batches: list[list[str]], values: list[Any], steps: Any, target: int) -> None:
    """Put each batch, two ahead of the consumer, or as many as several pairs would; the values take turns."""
    ahead = _behind(values) + AHEAD
    for step, keys in enumerate(batches):
        if step >= ahead:
            await steps.readexactly(1)
        await queue.put(queue.request(keys, {"x": values[step % len(values)]}))
        os.write(target, b"x")
    await steps.readexactly(min(ahead, len(batches)))


async def consume(queue: Backend, batches: list[list[str]], values: list[Any], steps: Any, target: int) -> None:
    """Get, read and delete each batch; with several values not before as many are there as several pairs would have."""
    expected, behind = read(values[0]), min(_behind(values), len(batches))
    await steps.readexactly(behind)
    for step, keys in enumerate(batches):
        if step < len(batches) - behind:
            await steps.readexactly(1)
        found = await queue.get(keys, ("x",))
        assert expected == read(found), "other bytes came to a consumer"
        del found
        await queue.delete(keys)
        os.write(target, b"x")


def _behind(values: list[Any]) -> int:
    """Return the batches that the other pairs would have."""
    return (len(values) - 1) * (AHEAD + 1)
