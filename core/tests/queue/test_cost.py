"""What the queue costs in Python: flat per row, and no herd of waiters. Counted in function calls, not in seconds."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.queue import Sequential, dense_column

torch = pytest.importorskip("torch")

Run = Callable[..., None]


class Calls:
    """Counts Python function calls inside of a ``with`` block."""

    def __enter__(self) -> Calls:
        self.count = 0
        self._before = sys.getprofile()
        sys.setprofile(self._seen)
        return self

    def _seen(self, frame: Any, event: str, argument: Any) -> None:
        self.count += event == "call"

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)


async def step(bench: Any, number: int) -> int:
    """A batch of 64 rows through reward and trainer; Python calls per row."""
    with Calls() as calls:
        await bench.publish(await bench.claim(groups=16), runs=4)
        rewarding = await bench.queue.lease("reward", max_samples=64, deadline_seconds=0)
        await bench.queue.put(rewarding, {"reward": dense_column(torch.zeros(64))})
        await bench.queue.ack(rewarding, step=number)
        batch = await bench.queue.lease_groups("trainer", number, deadline_seconds=0)
        await bench.queue.get(batch, ("ids", "reward"))
        await bench.queue.ack(batch, step=number)
    return calls.count // 64


def test_a_row_costs_the_same_however_many_there_are(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("reward", partition="train", columns=("ids",))
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids", "reward"))
        await bench.queue.register_consumer("archive", partition="train", columns=("ids",))  # never acks: rows pile up
        first = [await step(bench, number) for number in range(3)][-1]
        for number in range(3, 60):
            last = await step(bench, number)
        assert 60 * 64 == (await bench.queue.stats())["rows"]
        assert last <= 1.1 * first, f"{first} calls per row at first, {last} at the end"
        assert first < 250

    run(test)


def test_a_row_wakes_one_of_a_thousand_waiting_consumers(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        waiting = [asyncio.ensure_future(bench.queue.lease("a", deadline_seconds=9)) for _ in range(1000)]
        await asyncio.sleep(0)
        with Calls() as calls:
            await bench.put(group, 0)
            for _ in range(5):
                await asyncio.sleep(0)
        assert 1 == sum(task.done() for task in waiting)
        assert calls.count < 300
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await bench.put(group, 1)
        assert 1 == len(await bench.queue.lease("a", deadline_seconds=0))

    run(test)


def test_ten_thousand_waiting_consumers_wake_one_by_one(run: Run) -> None:
    """Rows, groups of tickets, samples of groups: what comes wakes whom it is for, counted by how often they look."""

    class Looks(Sequential):
        count = 0

        def sample(self, ready: Any, count: int | None) -> Any:
            Looks.count += 1
            return super().sample(ready, count)

    async def test(bench: Any) -> None:
        queue = bench.queue
        for name in ("rows", "groups", "samples"):
            await queue.register_consumer(name, partition="train", columns=("ids",), sampler=Looks())
        tickets = [await bench.claim() for _ in range(8)]
        waits = {
            "rows": [queue.lease("rows", 1, deadline_seconds=9) for _ in range(10_000)],
            "groups": [queue.lease_groups("groups", number, deadline_seconds=9) for number in range(10_000)],
            "samples": [queue.sample_groups("samples", 1, 0, deadline_seconds=9) for _ in range(10_000)],
        }
        tasks = {name: [asyncio.ensure_future(wait) for wait in some] for name, some in waits.items()}
        await asyncio.sleep(0)
        Looks.count = 0
        with Calls() as calls:
            for ticket in tickets:
                await bench.publish(ticket, runs=1)
            for _ in range(5):
                await asyncio.sleep(0)
        assert [8] * 3 == [sum(task.done() for task in some) for some in tasks.values()]
        assert list(range(8)) == [number for number, task in enumerate(tasks["groups"]) if task.done()]
        assert Looks.count <= 2 * 16, "as many as there is something for, and one look more each"
        assert calls.count < 8 * 1500
        for some in tasks.values():
            for task in some:
                task.cancel()
            await asyncio.gather(*some, return_exceptions=True)
        await bench.publish(await bench.claim(), runs=1)
        assert 1 == len(await queue.lease("rows", deadline_seconds=0)), "who leaves takes nothing along"
        assert 1 == len(await queue.sample_groups("samples", 1, 0, deadline_seconds=0))

    run(test)


def test_no_tensor_reaches_the_controller(run: Run) -> None:
    """What the controller keeps is plain: its saved state, and everything its records hold."""
    import gc

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        await bench.publish(await bench.claim(groups=2), runs=2)
        batch = await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        seen: set[int] = set()
        left: list[Any] = [bench.queue._state, batch]
        while left:
            found = left.pop()
            if id(found) in seen or isinstance(found, type) or callable(found):
                continue
            seen.add(id(found))
            assert not isinstance(found, torch.Tensor)
            if type(found).__module__.startswith("jackfield.queue") or isinstance(found, dict | list | tuple | set):
                left.extend(gc.get_referents(found))
        assert len(seen) > 100

    run(test)
