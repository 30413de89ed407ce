"""The queue holds producers back, and never the batch that somebody waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import QueueFull

torch = pytest.importorskip("torch")

Run = Callable[..., None]


async def fill(bench: Any, done: list[int]) -> None:
    """An explorer that works ahead as far as it is let."""
    while True:
        ticket = await bench.claim(groups=2)
        for slot in await bench.vacant(ticket):
            await bench.publish(ticket, slots=[slot])
        done.append(ticket.number)


def test_a_producer_waits_for_room_and_a_commit_makes_it(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        done: list[int] = []
        exploring = asyncio.ensure_future(fill(bench, done))
        await bench.clock.sleep(1)
        assert [0, 1] == done  # four rows each, ten rows of room
        assert 10 == (await bench.queue.stats())["rows"]
        for step in range(3):
            batch = await bench.queue.lease_groups("trainer", step, deadline_seconds=1)
            await bench.queue.ack(batch, step=step)
            await bench.clock.sleep(1)
            assert (await bench.queue.stats())["rows"] <= 12
            await bench.queue.commit(step)
            await bench.clock.sleep(1)
        assert [0, 1, 2, 3, 4] == done
        exploring.cancel()

    run(test, max_samples=10)


def test_what_the_trainer_waits_for_is_let_in_though_the_queue_is_full(run: Run) -> None:
    """Acked rows stay until their commit. A trainer that commits rarely must still get its next batch."""

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        done: list[int] = []
        exploring = asyncio.ensure_future(fill(bench, done))
        for step in range(6):  # never commits
            batch = await bench.queue.lease_groups("trainer", step, deadline_seconds=1)
            assert 4 == len(batch)
            await bench.queue.ack(batch, step=step)
        await bench.clock.sleep(1)
        assert list(range(6)) == done  # nothing beyond what was asked for
        exploring.cancel()

    run(test, max_samples=3)


def test_a_consumer_of_any_rows_is_not_starved_either(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        exploring = asyncio.ensure_future(fill(bench, []))
        seen: set[str] = set()
        for step in range(8):
            batch = await bench.queue.lease("trainer", deadline_seconds=1)
            assert seen.isdisjoint(batch.keys)
            seen.update(batch.keys)
            await bench.queue.ack(batch, step=step)
        assert len(seen) >= 8
        exploring.cancel()

    run(test, max_samples=2)


def test_further_columns_of_rows_that_are_there_are_never_held_back(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids", "reward"))
        (group,) = await bench.publish(await bench.claim(), runs=2)
        await bench.reward((await bench.queue.group(group)).keys)
        assert 2 == len(await bench.queue.lease_groups("trainer", 0, deadline_seconds=0))

    run(test, max_bytes=2 * 3 * 8)


def test_a_queue_that_stays_full_says_so(run: Run) -> None:
    async def test(bench: Any) -> None:
        ticket = await bench.claim(groups=2)
        first, second = await bench.vacant(ticket)
        await bench.publish(ticket, slots=[first])
        group = await bench.queue.open_group(second, task_id="t", runs=1)
        with pytest.raises(QueueFull, match="stayed full for 5 s") as caught:
            await bench.queue.put_run(group, 0, bench.columns(1), deadline_seconds=5)
        assert caught.value.code == "queue.full"
        assert "2 rows, 48 bytes" in str(caught.value)
        assert () == await bench.queue.put_run(group, 0, {})  # the run can still end

    run(test, max_bytes=60)


def test_a_dropped_group_makes_room_and_frees_its_waiting_runs(run: Run) -> None:
    async def test(bench: Any) -> None:
        from jackfield.errors import QueueError

        ticket = await bench.claim(groups=2)
        first, second = await bench.vacant(ticket)
        (full,) = await bench.publish(ticket, slots=[first])
        group = await bench.queue.open_group(second, task_id="t", runs=2)
        blocked = [asyncio.ensure_future(bench.put(group, number)) for number in range(2)]
        await bench.clock.sleep(1)
        assert not any(task.done() for task in blocked)
        await bench.queue.drop_group(full, "filtered")
        await asyncio.gather(*blocked)
        (again,) = await bench.vacant(await bench.claim())
        late = await bench.queue.open_group(again, task_id="t", runs=2)
        waiting = asyncio.ensure_future(bench.put(late, 0))
        await bench.clock.sleep(1)
        await bench.queue.release_tickets("explorer-0")
        await bench.queue.drop_group(group, "filtered")
        with pytest.raises(QueueError, match="was dropped: explorer"):
            await waiting
        assert 0 == (await bench.queue.stats())["rows"]

    run(test, max_samples=2)
