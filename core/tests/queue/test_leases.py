"""Consumers: readiness by columns, leases, acks, commit and rollback."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import DeadlineExceeded, LeaseError, QueueError
from jackfield.queue import Sampler, Sequential, dense_column, make_sampler, rows_of

torch = pytest.importorskip("torch")

Run = Callable[..., None]


async def reward_and_trainer(bench: Any) -> None:
    await bench.queue.register_consumer("reward", partition="train", columns=("ids",))
    await bench.queue.register_consumer("trainer", partition="train", columns=("ids", "reward"))


def test_a_row_is_ready_when_its_columns_are_there_settled_or_not(run: Run) -> None:
    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        await bench.put(group, 1, rows=2)
        batch = await bench.queue.lease("reward", deadline_seconds=0)
        assert (f"{group}/1/0", f"{group}/1/1") == batch.keys
        with pytest.raises(DeadlineExceeded, match=r"2 rows lack columns: train/0/0/0/1/0 \(reward\).*runs 0\)"):
            await bench.queue.lease("trainer", deadline_seconds=1)
        waiting = asyncio.ensure_future(bench.queue.lease("trainer", deadline_seconds=1))
        await asyncio.sleep(0)
        await bench.queue.put(batch.select([1]), {"reward": dense_column(torch.tensor([0.5]))}, tags=[{"score": 0.5}])
        got = await waiting
        assert (f"{group}/1/1",) == got.keys
        assert 0.5 == got.tags[0]["score"]
        columns = await bench.queue.get(got, ("reward", "ids"))
        assert [0.5] == columns["reward"].values.tolist()
        assert [[1, 1, 1]] == [row.tolist() for row in rows_of(columns["ids"])]

    run(test)


def test_each_consumer_sees_each_row_once(run: Run) -> None:
    async def test(bench: Any) -> None:
        for name in ("a", "b"):
            await bench.queue.register_consumer(name, partition="train", columns=("ids",))
        await bench.publish(await bench.claim(groups=3), runs=2)
        first = await bench.queue.lease("a", max_samples=4, deadline_seconds=0)
        rest = await bench.queue.lease("a", deadline_seconds=0, sampler=Sequential())
        assert (4, 2) == (len(first), len(rest))
        other = await bench.queue.lease("b", deadline_seconds=0, sampler=make_sampler("sequential"))
        assert (*first.keys, *rest.keys) == other.keys

    run(test)


def test_waiting_consumers_share_what_comes_and_wake_one_by_one(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        waiting = [asyncio.ensure_future(bench.queue.lease("a", max_samples=2, deadline_seconds=9)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        await bench.put(group, 0, rows=3)
        await bench.put(group, 1, rows=1)
        await bench.clock.sleep(1)
        assert [2, 2] == [len(task.result()) for task in waiting[1:3]]
        assert not waiting[3].done()
        with pytest.raises(DeadlineExceeded, match="any row of partition 'train' for consumer 'a'"):
            await waiting[3]

    run(test)


def test_what_one_waiter_leaves_goes_to_the_next(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=1)
        waiting = [asyncio.ensure_future(bench.queue.lease("a", max_samples=2, deadline_seconds=9)) for _ in range(3)]
        await asyncio.sleep(0)
        await bench.put(group, 0, rows=5)
        assert [2, 2, 1] == [len(batch) for batch in await asyncio.gather(*waiting)]

    run(test)


def test_a_cancelled_waiter_passes_on_what_it_was_woken_for(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=1)
        first, second = [asyncio.ensure_future(bench.queue.lease("a", deadline_seconds=9)) for _ in range(2)]
        await asyncio.sleep(0)
        await bench.put(group, 0)  # wakes the first one
        first.cancel()
        assert 1 == len(await second)
        assert first.cancelled()

    run(test)


def test_whoever_takes_over_gets_what_the_one_before_had_leased(run: Run) -> None:
    """Single rows and whole groups; what was acked stays acked, other consumers keep theirs."""

    async def test(bench: Any) -> None:
        for name in ("a", "b"):
            await bench.queue.register_consumer(name, partition="train", columns=("ids",))
        await bench.publish(await bench.claim(groups=3), runs=2)
        done = await bench.queue.lease("a", max_samples=2, deadline_seconds=0)
        await bench.queue.ack(done, step=0)
        left = await bench.queue.lease("a", max_samples=1, deadline_seconds=0)
        kept = await bench.queue.lease_groups("b", 0, deadline_seconds=0)
        assert left.keys == await bench.queue.take_over("a")
        again = await bench.queue.lease("a", deadline_seconds=0)
        assert set(kept.keys) - set(done.keys) == set(again.keys)
        with pytest.raises(LeaseError):
            await bench.queue.ack(left, step=0)
        assert set(kept.keys) == set(await bench.queue.take_over("b"))
        with pytest.raises(LeaseError):
            await bench.queue.ack(kept, step=0)
        assert kept.keys == (await bench.queue.lease_groups("b", 0, deadline_seconds=0)).keys

    run(test)


def test_an_expired_lease_is_refused_and_its_rows_are_leased_again(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",), lease_seconds=10)
        await bench.publish(await bench.claim(), runs=2)
        old = await bench.queue.lease("a", deadline_seconds=0)
        await bench.clock.sleep(6)
        await bench.queue.renew(old)
        await bench.clock.sleep(6)
        waiting = asyncio.ensure_future(bench.queue.lease("a", deadline_seconds=100))
        new = await waiting  # woken by the expiry
        assert 16.0 == pytest.approx(bench.clock.time(), abs=1e-3)
        assert old.keys == new.keys
        with pytest.raises(LeaseError, match="does not hold train/0/0/0/0/0, train/0/0/0/1/0 under this lease"):
            await bench.queue.ack(old, step=0)
        for refused in (lambda: bench.queue.renew(old), lambda: bench.queue.release(old)):
            with pytest.raises(LeaseError):
                await refused()
        with pytest.raises(LeaseError):
            await bench.queue.put(old, {"reward": dense_column(torch.ones(2))})
        await bench.queue.put(new, {"reward": dense_column(torch.ones(2))})
        assert new.keys == await bench.queue.ack(new, step=0)

    run(test)


def test_a_ticket_is_leased_when_it_is_complete_in_the_order_of_slots_and_runs(run: Run) -> None:
    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        ticket = await bench.claim(groups=3)
        slots = await bench.vacant(ticket)
        waiting = asyncio.ensure_future(bench.queue.lease_groups("trainer", 0, deadline_seconds=9))
        for slot in reversed(slots):
            (group,) = await bench.publish(ticket, slots=[slot])
            assert not waiting.done()
            await bench.reward((await bench.queue.group(group)).keys[::-1])
        batch = await waiting
        assert tuple(f"train/0/{slot}/0/{number}/0" for slot in range(3) for number in range(2)) == batch.keys
        with pytest.raises(QueueError, match="has had all groups"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        await bench.queue.release(batch)
        assert batch.keys == (await bench.queue.lease_groups("trainer", ticket, deadline_seconds=0)).keys

    run(test)


def test_mini_batches_stream_whole_groups_as_they_become_ready(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        ticket = await bench.claim(groups=5)
        slots = await bench.vacant(ticket)
        taken: list[tuple[str, ...]] = []

        async def train() -> None:
            while batch := await bench.queue.lease_groups("trainer", 0, groups=2, deadline_seconds=9):
                taken.append(tuple(dict.fromkeys(batch.group_ids)))

        training = asyncio.ensure_future(train())
        for slot in (slots[4], slots[1], slots[0], slots[3], slots[2]):
            await bench.publish(ticket, slots=[slot])
            await bench.clock.sleep(1)
        await training
        assert [("train/0/1/0", "train/0/4/0"), ("train/0/0/0", "train/0/3/0"), ("train/0/2/0",)] == taken

    run(test)


def test_groups_that_were_given_back_are_counted_again(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        ticket = await bench.claim(groups=2)
        first, second = await bench.vacant(ticket)
        await bench.publish(ticket, slots=[first])
        await bench.queue.release(await bench.queue.lease_groups("trainer", 0, groups=1, deadline_seconds=0))
        with pytest.raises(DeadlineExceeded, match="slots without a group: 1"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        await bench.publish(ticket, slots=[second])
        assert 4 == len(await bench.queue.lease_groups("trainer", 0, deadline_seconds=0))

    run(test)


def test_a_group_that_was_leased_as_a_whole_is_acked_as_a_whole(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        await bench.publish(await bench.claim(groups=2), runs=2)
        batch = await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        with pytest.raises(QueueError, match="group train/0/0/0 was leased as a whole"):
            await bench.queue.ack(batch.select([0]), step=0)
        assert 2 == len(await bench.queue.ack(batch.select([1, 0]), step=0))
        assert 2 == len(await bench.queue.ack(batch.select([2, 3]), step=0))

    run(test)


def test_rows_are_deleted_when_every_consumer_acked_and_the_checkpoint_committed(run: Run) -> None:
    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        ticket = await bench.claim()
        await bench.publish(ticket, runs=2)
        rewarding = await bench.queue.lease("reward", deadline_seconds=0)
        await bench.queue.put(rewarding, {"reward": dense_column(torch.zeros(2))})
        training = await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        await bench.queue.ack(training, step=0)
        await bench.queue.commit(0)
        await bench.queue.flush()
        assert 2 == (await bench.queue.backend.stats()).samples  # the reward stage has not acked
        await bench.queue.ack(rewarding, step=0)  # of a step that is committed already: final
        await bench.queue.flush()
        assert 0 == (await bench.queue.backend.stats()).samples
        assert {"rows": 0, "bytes": 0, "tickets": 0, "groups_open": 0, "rows_leased": 0} == await bench.queue.stats()
        with pytest.raises(QueueError, match=r"ticket 0 .* has been consumed"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        assert () == await bench.queue.put(training.keys, {"late": dense_column(torch.zeros(2))})
        assert [] == await bench.vacant(ticket)
        assert ["ack", "commit", "ack"] == [entry["event"] for entry in bench.queue.ledger]

    run(test)


def test_rollback_gives_back_what_was_acked_after_the_step(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        batches = []
        for step in range(3):
            await bench.publish(await bench.claim(), runs=2)
            batches.append(await bench.queue.lease_groups("trainer", step, deadline_seconds=0))
            await bench.queue.ack(batches[-1], step=step)
        await bench.queue.commit(0)
        assert (*batches[1].keys, *batches[2].keys) == await bench.queue.rollback(0)
        with pytest.raises(LeaseError):
            await bench.queue.ack(batches[1], step=1)
        again = await bench.queue.lease_groups("trainer", 1, deadline_seconds=0)
        assert batches[1].keys == again.keys
        await bench.queue.ack(again, step=1)
        await bench.queue.commit(1)
        with pytest.raises(QueueError, match="cannot be taken back"):
            await bench.queue.rollback(0)
        assert () == await bench.queue.rollback(1)
        events = [(entry["event"], entry.get("step"), len(entry["keys"])) for entry in bench.queue.ledger]
        assert [("commit", 0, 2), ("rollback", 0, 4), ("ack", 1, 2), ("commit", 1, 2), ("rollback", 1, 0)] == events[3:]

    run(test)


def test_work_on_rows_that_were_dropped_meanwhile_is_ignored(run: Run) -> None:
    """A reward stage that scores a run of a group which is then dropped must not be punished for it."""

    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        await bench.put(group, 0)
        batch = await bench.queue.lease("reward", deadline_seconds=0)
        await bench.queue.fail_run(group, 1, "no answer")
        assert () == await bench.queue.put(batch, {"reward": dense_column(torch.ones(1))})
        assert () == await bench.queue.ack(batch, step=0)
        await bench.queue.fail_rows(batch.keys, "gone already")
        await bench.queue.flush()
        assert 0 == (await bench.queue.backend.stats()).samples

    run(test)


def test_a_row_that_goes_while_its_column_is_written_leaves_no_bytes(run: Run) -> None:
    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        (group,) = await bench.publish(await bench.claim(), runs=2)
        keys, store = (await bench.queue.group(group)).keys, bench.queue.backend.put

        async def interrupted(request: Any) -> Any:
            await bench.queue.drop_group(group, "filtered")
            await bench.queue.flush()
            return await store(request)

        bench.queue.backend.put = interrupted
        assert () == await bench.queue.put(keys, {"reward": dense_column(torch.ones(2))})
        await bench.queue.flush()
        assert 0 == (await bench.queue.backend.stats()).samples == (await bench.queue.stats())["bytes"]

    run(test)


def test_a_column_is_written_once_unless_a_lease_or_the_caller_says_otherwise(run: Run) -> None:
    async def test(bench: Any) -> None:
        await reward_and_trainer(bench)
        (group,) = await bench.publish(await bench.claim(), runs=2)
        keys = (await bench.queue.group(group)).keys
        await bench.reward(keys)
        with pytest.raises(QueueError, match=r"column reward of row train/0/0/0/0/0 is written already") as caught:
            await bench.reward(keys)
        assert caught.value.code == "queue.column"
        batch = await bench.queue.lease("reward", deadline_seconds=0)
        for value, target, overwrite in ((2.0, batch, False), (3.0, keys, True)):
            column = {"reward": dense_column(torch.full((2,), value))}
            await bench.queue.put(target, column, overwrite=overwrite)
            assert [value] * 2 == (await bench.queue.get(keys, ("reward",)))["reward"].values.tolist()
        assert (await bench.queue.stats())["bytes"] == (await bench.queue.backend.stats()).bytes

    run(test)


def test_what_is_left_of_a_group_that_was_consumed_row_by_row_is_not_a_group(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", partition="train", columns=("ids",))
        (group,) = await bench.publish(await bench.claim(), runs=3)
        await bench.queue.ack(await bench.queue.lease("trainer", max_samples=2, deadline_seconds=0))
        with pytest.raises(DeadlineExceeded, match="rows leased one by one: 2 of train/0/0/0"):
            await bench.queue.lease_groups("trainer", 0, deadline_seconds=1)
        with pytest.raises(QueueError, match="cannot be changed any more"):
            await bench.queue.drop_group(group, "too late")
        await bench.queue.ack(await bench.queue.lease("trainer", deadline_seconds=0))
        assert 0 == (await bench.queue.stats())["tickets"]

    run(test)


def test_a_late_consumer_sees_the_rows_that_are_there(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.publish(await bench.claim(groups=2), runs=1)
        await bench.queue.register_consumer("late", partition="train", columns=("ids",))
        await bench.queue.register_consumer("late", partition="train", columns=("ids",))
        assert 2 == len(await bench.queue.lease_groups("late", 0, deadline_seconds=0))
        with pytest.raises(QueueError, match="registered already"):
            await bench.queue.register_consumer("late", partition="train", columns=("ids", "reward"))
        with pytest.raises(QueueError, match="no consumer 'nobody'") as caught:
            await bench.queue.lease("nobody")
        assert caught.value.code == "queue.unknown-consumer"

    run(test)


def test_a_sampler_cannot_choose_what_it_was_not_offered(run: Run) -> None:
    class Greedy(Sampler):
        def sample(self, ready: Any, max_samples: int | None) -> list[str]:
            return [*ready, *ready]

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        await bench.publish(await bench.claim(), runs=1)
        with pytest.raises(QueueError, match="a sampler of consumer 'a' chose rows"):
            await bench.queue.lease("a", deadline_seconds=0, sampler=Greedy())
        assert 1 == len(await bench.queue.lease("a", deadline_seconds=0))
        with pytest.raises(QueueError, match="no sampler is named 'lucky'"):
            make_sampler("lucky")

    run(test)


def test_a_sampler_that_chooses_none_waits_and_lets_others_go_first(run: Run) -> None:
    class Long(Sampler):
        def sample(self, ready: Any, max_samples: int | None) -> list[str]:
            return [key for key in ready if ready.tags(key)["rollout"] == 1]

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=2)
        picky = asyncio.ensure_future(bench.queue.lease("a", deadline_seconds=9, sampler=Long()))
        plain = asyncio.ensure_future(bench.queue.lease("a", deadline_seconds=9))
        await asyncio.sleep(0)
        await bench.put(group, 0)
        assert (f"{group}/0/0",) == (await plain).keys
        assert not picky.done()
        await bench.put(group, 1)
        assert (f"{group}/1/0",) == (await picky).keys

    run(test)


def test_samplers_that_choose_none_wait_for_news_without_waking_each_other(run: Run) -> None:
    class Nothing(Sampler):
        def sample(self, ready: Any, max_samples: int | None) -> list[str]:
            return []

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await bench.queue.open_group(slot, task_id="t", runs=1)
        waits = [bench.queue.lease("a", deadline_seconds=9, sampler=Nothing()) for _ in range(3)]
        waiting = asyncio.gather(*waits, return_exceptions=True)
        await asyncio.sleep(0)
        await bench.put(group, 0)
        for error in await waiting:
            assert isinstance(error, DeadlineExceeded)
            assert "1 rows are ready, and the sampler chose none" in str(error)
        assert 9 == pytest.approx(bench.clock.time())

    run(test)


def test_closing_ends_every_wait(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        ticket = await bench.claim(groups=2)
        first, _ = await bench.vacant(ticket)
        group = await bench.queue.open_group(first, task_id="t", runs=1)
        waits = [
            asyncio.ensure_future(wait)
            for wait in (
                bench.queue.lease("a"),
                bench.queue.lease_groups("a", 0),
                bench.queue.lease_groups("a", 5),
                bench.queue.sample_groups("a", 1, 0),
                bench.queue.wait_group_settled(group, 60),
                bench.queue.wait_offer("train", 60),
                anext(bench.queue.slots(ticket, 60)),
            )
        ]
        await asyncio.sleep(0)
        await bench.queue.close()
        for wait in waits:
            with pytest.raises(QueueError) as caught:
                await wait
            assert caught.value.code == "queue.closed"
        assert 0 == bench.clock.time()

    run(test)


def test_unknown_rows_and_empty_requests_are_refused(run: Run) -> None:
    async def test(bench: Any) -> None:
        (group,) = await bench.publish(await bench.claim(), runs=1)
        for key in ("nonsense", "train/7/0/0/0/0", "train/x/0/0/0/0", "other/0/0/0/0/0"):
            with pytest.raises(QueueError) as caught:
                await bench.queue.put([key], {"x": dense_column(torch.ones(1))})
            assert (caught.value.code, caught.value.where) == ("queue.unknown-sample", key)
        with pytest.raises(QueueError, match="no rows are named"):
            await bench.queue.get((), ("ids",))
        with pytest.raises(QueueError, match="column 'x' has 2 rows"):
            await bench.queue.put([f"{group}/0/0"], {"x": dense_column(torch.ones(2))})
        with pytest.raises(QueueError, match="named twice"):
            await bench.queue.put([f"{group}/0/0"] * 2, {"x": dense_column(torch.ones(2))})

    run(test)


def test_batches_select_and_split_under_one_lease(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        await bench.publish(await bench.claim(groups=7), runs=1)
        batch = await bench.queue.lease("a", deadline_seconds=0)
        parts = batch.split(3)
        assert [3, 2, 2] == [len(part) for part in parts]
        assert batch.keys == tuple(key for part in parts for key in part.keys)
        assert (batch.keys[5], batch.keys[0]) == batch.select([5, 0]).keys
        assert set(batch.claims) == {claim for part in parts for claim in part.claims}
        for part in parts:
            await bench.queue.ack(part, step=0)
        for bad in (0, 8):
            with pytest.raises(QueueError, match="cannot be split"):
                batch.split(bad)

    run(test)
