"""Explorers that come and go: who gets which ticket, and when there is nothing left to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import DeadlineExceeded, QueueError

pytest.importorskip("torch")

Run = Callable[..., None]


async def consume(bench: Any, number: int) -> None:
    await bench.queue.ack(await bench.queue.lease_groups("trainer", number, deadline_seconds=0), step=number)


def wait(bench: Any, explorer: str, seconds: float = 50.0) -> asyncio.Future[Any]:
    return asyncio.ensure_future(bench.queue.wait_ticket("train", explorer, 1, 2, seconds))


def test_the_last_explorer_waits_for_what_others_may_give_back(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", "train", ("ids",))
        first, second = [await wait(bench, name) for name in ("one", "two")]
        assert [0, 1] == [first.number, second.number]
        await bench.publish(first)
        idle = wait(bench, "one")
        await consume(bench, 0)
        await asyncio.sleep(0)
        assert not idle.done(), "ticket 1 may be given back"
        await bench.queue.release_tickets("two")
        again = await idle
        assert (1, "one") == (again.number, again.explorer)
        await bench.publish(again)
        idle = wait(bench, "two")
        await consume(bench, 1)
        assert await idle is None, "everything before ticket 2 is finished"

    run(test)


def test_a_wait_for_tickets_ends_with_who_is_not_done(run: Run) -> None:
    async def test(bench: Any) -> None:
        for name in ("one", "two"):
            await wait(bench, name)
        with pytest.raises(DeadlineExceeded, match="ticket 0 of partition 'train': no group was opened in slots 0"):
            await wait(bench, "three", seconds=5.0)
        assert 5.0 == pytest.approx(bench.clock.time(), abs=1e-3)
        idle = wait(bench, "three")
        (slot,) = await bench.vacant(await bench.queue.claim_ticket("train", "one", 1))
        assert 2 == slot.ticket, "beyond the bound nobody waits for it"
        (slot,) = [each async for each in _first(bench, 0)]
        await bench.queue.drop_group(await bench.queue.open_group(slot, "t", runs=1), "filtered")
        with pytest.raises(QueueError, match="ticket 0 of partition 'train' has failed"):
            await idle

    run(test, max_retries=0)


async def _first(bench: Any, number: int) -> Any:
    from jackfield.queue import Ticket

    slots = bench.queue.slots(Ticket("train", number, 1, "one"), 5.0)
    yield await anext(slots)
    await slots.aclose()
