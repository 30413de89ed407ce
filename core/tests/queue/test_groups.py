"""Tickets, slots, groups and runs: published whole, or dropped and refilled, never half."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue import GroupSlot

torch = pytest.importorskip("torch")

Run = Callable[..., None]


async def trainer(bench: Any, *columns: str) -> None:
    await bench.queue.register_consumer("trainer", partition="train", columns=columns or ("ids",))


def test_tickets_are_numbered_and_slots_come_at_once(run: Run) -> None:
    async def test(bench: Any) -> None:
        first, second = await bench.claim(groups=2), await bench.claim(groups=3)
        assert [(0, 2), (1, 3)] == [(ticket.number, ticket.groups) for ticket in (first, second)]
        assert [(0, 0, 0), (0, 1, 0)] == [(s.ticket, s.index, s.attempt) for s in await bench.vacant(first)]
        assert 0 == (await bench.queue.claim_ticket("eval", "explorer-0", 1)).number

    run(test)


def test_a_group_is_published_when_all_runs_ended(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim()
        (slot,) = await bench.vacant(ticket)
        group = await bench.queue.open_group(slot, task_id="t", runs=3, minimum_rows=3, tags={"source": "gsm8k"})
        await bench.put(group, 2, rows=2)
        await bench.queue.fail_run(group, 1, "out of tokens")
        assert "open" == (await bench.queue.group(group)).state
        keys = await bench.put(group, 0)
        view = await bench.queue.group(group)
        assert ("published", ((1, "out of tokens"),)) == (view.state, view.failed_runs)
        assert (*keys, f"{group}/2/0", f"{group}/2/1") == view.keys  # by run, whatever came first
        assert (0, 2, 2) == view.key_runs
        batch = await bench.queue.lease_groups("trainer", ticket, deadline_seconds=0)
        assert view.keys == batch.keys
        assert {"task_id": "t", "batch": 0, "group": 0, "retry": 0, "rollout": 2, "sequence": 1, "source": "gsm8k"} == (
            batch.tags[2]
        )

    run(test)


def test_a_run_without_rows_drops_its_group_unless_the_policy_allows_it(run: Run) -> None:
    async def test(bench: Any) -> None:
        ticket = await bench.claim(groups=2)
        strict, lenient = [
            await bench.queue.open_group(slot, task_id="t", runs=2, minimum_rows=minimum)
            for slot, minimum in zip(await bench.vacant(ticket), (None, 1), strict=True)
        ]
        for group in (strict, lenient):
            assert () == await bench.queue.put_run(group, 0, {})
            await bench.put(group, 1)
        assert "runs without a surviving row: 0" == (await bench.queue.group(strict)).reason
        assert "published" == (await bench.queue.group(lenient)).state
        assert [(0, 1)] == [(slot.index, slot.attempt) for slot in await bench.vacant(ticket)]

    run(test)


def test_a_dropped_group_is_refilled_inside_its_ticket(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim(groups=2)
        made: list[tuple[int, int]] = []

        async def explore() -> None:
            async for slot in bench.queue.slots(ticket, 10):
                made.append((slot.index, slot.attempt))
                group = await bench.queue.open_group(slot, task_id=f"t{slot.index}", runs=1)
                if (slot.index, slot.attempt) in ((0, 0), (0, 1)):
                    await bench.queue.fail_run(group, 0, "no answer")
                else:
                    await bench.put(group, 0)

        exploring = asyncio.ensure_future(explore())
        batch = await bench.queue.lease_groups("trainer", ticket, deadline_seconds=10)
        await bench.queue.ack(batch, step=0)
        await exploring
        assert [(0, 0), (1, 0), (0, 1), (0, 2)] == sorted(made, key=lambda place: (place[1], place[0]))
        assert ("train/0/0/2", "train/0/1/0") == batch.group_ids
        assert {"train/0/0/0/0", "train/0/0/0", "train/0/0/1/0", "train/0/0/1"} == set(
            await bench.queue.drain_failures()
        )
        assert {} == await bench.queue.drain_failures()

    run(test)


def test_a_group_that_loses_its_reward_is_refilled_after_generation_has_ended(run: Run) -> None:
    """``slots`` goes on until a consumer has acked the groups, since only then none of them can be dropped."""

    async def test(bench: Any) -> None:
        await trainer(bench, "ids", "reward")
        ticket = await bench.claim()

        async def explore() -> int:
            count = 0
            async for slot in bench.queue.slots(ticket, 10):
                count += 1
                await bench.publish(ticket, slots=[slot])
            return count

        exploring = asyncio.ensure_future(explore())
        await bench.clock.sleep(1)
        assert "published" == (await bench.queue.group("train/0/0/0")).state
        await bench.queue.fail_rows(["train/0/0/0/1/0"], "no verdict")
        await bench.clock.sleep(1)
        assert "dropped" == (await bench.queue.group("train/0/0/0")).state
        await bench.reward((await bench.queue.group("train/0/0/1")).keys)
        assert not exploring.done()
        batch = await bench.queue.lease_groups("trainer", ticket, deadline_seconds=0)
        assert ("train/0/0/1",) * 2 == batch.group_ids
        with pytest.raises(QueueError, match="leased by trainer"):
            await bench.queue.fail_rows(batch.keys[:1], "too late")
        with pytest.raises(QueueError, match="leased by trainer"):
            await bench.queue.drop_group("train/0/0/1", "too late")
        await bench.clock.sleep(1000)  # a long step
        assert not exploring.done()
        await bench.queue.ack(batch, step=0)
        assert 2 == await exploring

    run(test)


def test_survivors_are_published_anew_when_the_policy_allows_it(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench, "ids", "reward")
        ticket = await bench.claim()
        (slot,) = await bench.vacant(ticket)
        group = await bench.queue.open_group(slot, task_id="t", runs=3, minimum_rows=2)
        keys = [key for number in range(3) for key in await bench.put(group, number)]
        await bench.reward([keys[0], keys[2]])
        with pytest.raises(DeadlineExceeded, match=r"1 rows lack columns: train/0/0/0/1/0 \(reward\)"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        waiting = asyncio.ensure_future(bench.queue.lease_groups("trainer", 0, deadline_seconds=1))
        await asyncio.sleep(0)
        await bench.queue.fail_rows([keys[1]], "timeout")
        assert (keys[0], keys[2]) == (await waiting).keys

    run(test)


def test_a_filter_may_drop_a_published_group(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim()
        (group,) = await bench.publish(ticket)
        await bench.queue.drop_group(group, "all rewards are equal")
        await bench.queue.drop_group(group, "twice: no effect")
        assert "all rewards are equal" == (await bench.queue.group(group)).reason
        assert group not in await bench.queue.drain_failures(), "what a filter drops has not failed"
        with pytest.raises(DeadlineExceeded, match="waits to be claimed again; slots without a group: 0"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        # nobody iterates over its slots: the ticket is offered to the next claimant
        assert 0 == await bench.queue.wait_offer("train", 0)
        again = await bench.claim(groups=7, explorer="explorer-1")
        assert (0, 1) == (again.number, again.groups)
        assert ["train/0/0/1"] == await bench.publish(again)
        assert 2 == len(await bench.queue.lease_groups("trainer", 0, deadline_seconds=0))

    run(test)


def test_a_ticket_fails_after_too_many_refills_and_names_the_reasons(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim(groups=2)

        async def explore() -> None:
            async for slot in bench.queue.slots(ticket, 10):
                group = await bench.queue.open_group(slot, task_id="t", runs=1)
                if slot.index == 1:
                    await bench.queue.fail_run(group, 0, f"reason {slot.attempt}")

        waiting = asyncio.ensure_future(bench.queue.lease_groups("trainer", 0, deadline_seconds=10))
        for failing in (explore(), waiting):
            with pytest.raises(QueueError, match=r"reason 0.*reason 1.*reason 2.*refilled 2 times"):
                await failing
        with pytest.raises(QueueError, match="has failed"):
            await bench.put("train/0/0/0", 0)
        with pytest.raises(QueueError, match="has failed"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=10)

    run(test, max_retries=2)


def test_a_dead_explorers_ticket_is_handed_out_again_with_the_same_attempts(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim(groups=3)
        done, half, opened = await bench.vacant(ticket)
        await bench.publish(ticket, slots=[done])
        group = await bench.queue.open_group(half, task_id="t", runs=2)
        await bench.put(group, 0)
        stuck = bench.queue.slots(ticket, 10)
        waiting = asyncio.ensure_future(anext(stuck))
        await asyncio.sleep(0)

        assert (ticket,) == await bench.queue.release_tickets("explorer-0")
        assert () == await bench.queue.release_tickets("explorer-0")
        with pytest.raises(QueueError, match="was taken from explorer 'explorer-0'"):
            await waiting
        with pytest.raises(QueueError, match="was dropped: explorer 'explorer-0' was released"):
            await bench.put(group, 1)
        again = await bench.claim(explorer="explorer-1")
        slots = await bench.vacant(again)
        assert [(0, 1, 0, 1), (0, 2, 0, 1)] == [(s.ticket, s.index, s.attempt, s.claim) for s in slots]
        with pytest.raises(QueueError, match="was taken from explorer 'explorer-0'"):
            await bench.queue.open_group(opened, task_id="t", runs=1)
        assert ["train/0/1/0r1", "train/0/2/0r1"] == await bench.publish(again, slots=slots)
        batch = await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        assert ["train/0/0/0"] * 2 == list(batch.group_ids[:2])
        await bench.queue.flush()
        assert 6 == (await bench.queue.backend.stats()).samples  # the half group's row is gone

    run(test)


def test_a_slot_takes_one_group_and_a_run_ends_once(run: Run) -> None:
    async def test(bench: Any) -> None:
        ticket = await bench.claim()
        (slot,) = await bench.vacant(ticket)
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        with pytest.raises(QueueError, match="not this explorer's to fill"):
            await bench.queue.open_group(slot, task_id="t", runs=2)
        await bench.put(group, 0)
        for again in (lambda: bench.put(group, 0), lambda: bench.put(group, 2)):
            with pytest.raises(QueueError, match=r"ended already|no such run"):
                await again()
        with pytest.raises(QueueError, match="ended already"):
            await bench.queue.fail_run(group, 0, "twice")
        with pytest.raises(QueueError, match="has not been claimed"):
            await bench.queue.open_group(GroupSlot(5, 0, 0, "train", "explorer-0"), task_id="t", runs=1)

    run(test)


def test_a_put_that_breaks_off_leaves_nothing_and_can_be_repeated(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        ticket = await bench.claim()
        (slot,) = await bench.vacant(ticket)
        group = await bench.queue.open_group(slot, task_id="t", runs=1)
        store, started, go_on = bench.queue.backend.put, asyncio.Event(), asyncio.Event()

        async def slow(request: Any) -> Any:
            result = await store(request)
            started.set()
            await go_on.wait()
            return result

        bench.queue.backend.put = slow
        putting = asyncio.ensure_future(bench.put(group, 0))
        await started.wait()
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting
        bench.queue.backend.put = store
        assert (f"{group}/0r1/0",) == await bench.put(group, 0)
        await bench.queue.flush()
        assert 1 == (await bench.queue.backend.stats()).samples == (await bench.queue.stats())["rows"]
        assert 1 == len(await bench.queue.lease_groups("trainer", 0, deadline_seconds=0))

    run(test)


def test_settled_groups_yields_each_published_group_once(run: Run) -> None:
    async def test(bench: Any) -> None:
        ticket = await bench.claim(groups=3)
        slots = await bench.vacant(ticket)
        await bench.publish(ticket, slots=slots[:1])
        seen: list[str] = []

        async def watch() -> None:
            async for view in bench.queue.settled_groups("train"):
                seen.append(view.id)  # noqa: PERF401

        watching = asyncio.ensure_future(watch())
        await asyncio.sleep(0)
        group = await bench.queue.open_group(slots[1], task_id="t", runs=1)
        settled = asyncio.ensure_future(bench.queue.wait_group_settled(group, 5))
        await asyncio.sleep(0)
        await bench.queue.fail_run(group, 0, "no")
        assert "dropped" == (await settled).state
        await bench.publish(ticket, slots=slots[2:])
        await bench.clock.sleep(1)
        assert ["train/0/0/0", "train/0/2/0"] == seen
        await bench.queue.close()
        await watching

    run(test)


def test_deadlines_name_the_runs_that_have_not_ended(run: Run) -> None:
    async def test(bench: Any) -> None:
        await trainer(bench)
        with pytest.raises(DeadlineExceeded, match=r"waited 1 s for ticket 0 .*no explorer has claimed it"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        ticket = await bench.claim(groups=2)
        first, _ = await bench.vacant(ticket)
        group = await bench.queue.open_group(first, task_id="t-7", runs=3)
        await bench.put(group, 1)
        with pytest.raises(
            DeadlineExceeded, match=r"slots without a group: 1; .*train/0/0/0 \(task 't-7', runs 0, 2\)"
        ):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        with pytest.raises(DeadlineExceeded, match="no group was opened in slots 1"):
            await anext(bench.queue.slots(ticket, 5))
        with pytest.raises(DeadlineExceeded, match="still running: runs 0, 2"):
            await bench.queue.wait_group_settled(group, 5)

    run(test)
