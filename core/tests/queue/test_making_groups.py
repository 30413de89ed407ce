"""Batches, groups and rollouts: groups are published whole, or dropped and retried."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Batch, GroupKey, Lineage, NewGroup, RolloutReport, Written

torch = pytest.importorskip("torch")

Run = Callable[..., None]


def test_batches_are_numbered_and_their_groups_come_as_one_list(run: Run) -> None:
    async def test(bench: Any) -> None:
        first, second = await bench.claim(groups=2), await bench.claim(groups=3)
        assert [(0, 2, 2), (1, 3, 3)] == [(batch.number, batch.groups, batch.vacant) for batch in (first, second)]
        lists = bench.queue.groups_to_fill(first, 0.0)
        assert (GroupKey("train", 0, 0), GroupKey("train", 0, 1)) == await anext(lists)
        await lists.aclose()
        assert 0 == (await bench.queue.claim_batch("eval", "explorer-0", 1)).number

    run(test)


def test_a_group_is_published_when_all_rollouts_ended(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        (key,) = await bench.vacant(await bench.claim())
        group = await bench.open(key, rollouts=2, source="gsm8k")
        late = await bench.end(group, 1, samples=2)
        with pytest.raises(DeadlineExceeded):
            await bench.lease(0)
        early = await bench.end(group, 0)
        meta = await bench.lease(0)
        assert (*early, *late) == meta.keys  # by rollout, whatever came first
        own = {"task_id": "task-0", "batch": 0, "group": 0, "retry": 0, "rollout": 1, "sequence": 1, "source": "gsm8k"}
        assert own == meta.tags[2]

    run(test)


def test_a_rollout_without_samples_drops_its_group(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim(groups=2)
        for key in await bench.vacant(batch):
            await bench.open(key, 2)
            await bench.end(str(key), 0, samples=key.index)
            await bench.end(str(key), 1)
        assert ["train/0/1/0"] == sorted(set((await bench.some(1)).groups))
        assert [(0, 1)] == [(key.index, key.retry) for key in await bench.vacant(batch)]

    run(test)


def test_a_dropped_group_is_made_again_inside_its_batch(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim(groups=2)
        made: list[tuple[int, int]] = []

        async def explore() -> None:
            async for keys in bench.queue.groups_to_fill(batch, 10):
                for key in keys:
                    made.append((key.retry, key.index))
                    await bench.open(key, rollouts=1)
                    await (
                        bench.fail(str(key), 0, "no answer")
                        if key.retry < 2 > key.index * 9
                        else bench.end(str(key), 0)
                    )

        exploring = asyncio.ensure_future(explore())
        meta = await bench.lease(0, seconds=10)
        await bench.queue.ack(meta, step=0)
        await exploring
        assert [(0, 0), (0, 1), (1, 0), (2, 0)] == sorted(made)
        assert ("train/0/0/2", "train/0/1/0") == meta.groups
        failed = {"train/0/0/0/0", "train/0/0/1/0"}  # the rollouts, and not their groups as well
        assert failed == set(await bench.queue.drain_failures())
        assert {} == await bench.queue.drain_failures()

    run(test)


def test_groups_are_handed_out_until_a_consumer_has_acked_them(run: Run) -> None:
    """Until then a group can be dropped, for example because a reward failed."""

    async def test(bench: Any) -> None:
        await bench.trainer("ids", "reward")
        await bench.stage()
        batch = await bench.claim()

        async def explore() -> int:
            count = 0
            async for keys in bench.queue.groups_to_fill(batch, 10):
                count += len(await bench.publish(batch, keys=keys))
            return count

        exploring = asyncio.ensure_future(explore())
        scored = await bench.queue.lease("reward", deadline_seconds=5)
        await bench.queue.fail_samples({scored.keys[1]: "no verdict"})
        assert () == await bench.reward(scored), "its group was dropped"
        again = await bench.queue.lease("reward", deadline_seconds=5)
        assert ("train/0/0/1",) * 2 == again.groups
        await bench.reward(again)
        meta = await bench.lease(0)
        for change in (bench.queue.fail_samples({meta.keys[0]: "late"}), bench.queue.drop_groups(meta.groups, "late")):
            with pytest.raises(QueueError) as refused:
                await change
            assert "queue.invalid" == refused.value.code
        await bench.clock.sleep(1000)  # a long step
        assert not exploring.done()
        await bench.queue.ack(meta, step=0)
        assert 2 == await exploring

    run(test)


def test_a_rollout_may_lose_one_of_its_samples(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        (key,) = await bench.vacant(await bench.claim())
        await bench.open(key, 1)
        keys = await bench.end(str(key), 0, samples=2)
        await bench.queue.fail_samples({keys[0]: "no verdict", "train/0/0/0/5/0": "never there"})
        assert (keys[1],) == (await bench.lease(0)).keys

    run(test)


def test_a_filter_drops_groups_and_nothing_has_failed(run: Run) -> None:
    async def test(bench: Any) -> None:
        batch = await bench.claim(groups=2)
        groups = await bench.publish(batch)
        await bench.queue.drop_groups(groups, "all rewards are equal")
        await bench.queue.drop_groups(groups, "a second time")
        assert {} == await bench.queue.drain_failures()
        assert [1, 1] == [key.retry for key in await bench.vacant(await bench.claim())]
        assert {"samples": 0, "bytes": 0} == await bench.counts("samples", "bytes")

    run(test)


def test_a_batch_fails_after_too_many_retries_and_names_the_reasons(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim()
        waiting = asyncio.ensure_future(bench.lease(0, seconds=5))

        async def explore() -> None:
            async for keys in bench.queue.groups_to_fill(batch, 5):
                await bench.open(keys[0], rollouts=1)
                await bench.fail(str(keys[0]), 0, "the tool is broken")

        for error in await asyncio.gather(explore(), waiting, return_exceptions=True):
            assert isinstance(error, QueueError)
            assert "queue.batch-failed" == error.code
            assert "the tool is broken" in str(error)
        with pytest.raises(QueueError) as refused:
            await bench.queue.claim_batch("train", "explorer-0", 1, below=1)
        assert "queue.batch-failed" == refused.value.code

    run(test, max_retries=1)


def test_a_dead_explorers_batch_is_handed_out_again_with_the_same_retries(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        bench.queue.caller = lambda: "client 1"
        batch = await bench.claim(groups=3, explorer="one")
        bench.queue.caller = lambda: "client 2"
        keys = await bench.vacant(batch)
        await bench.publish(batch, keys=keys[:1])
        half = await bench.open(keys[1])
        lost = await bench.end(half, 0)
        await bench.queue.end_holder("client 1")
        with pytest.raises(QueueError):
            await anext(bench.queue.groups_to_fill(batch, 5))
        assert lost == await bench.queue.end_rollouts(
            [RolloutReport(group=half, rollout=0, keys=lost, written=Written(columns=("ids",), sizes=(24,)))]
        ), "a late report changes nothing"
        with pytest.raises(QueueError):
            await bench.open(keys[2])
        again = await bench.claim(groups=1, explorer="two")
        assert (0, "two", 2) == (again.number, again.explorer, again.vacant)
        assert ["train/0/1/0r1", "train/0/2/0r1"] == [str(key) for key in await bench.publish(again)]
        assert 6 == len(await bench.lease(0))
        await bench.queue.flush()
        assert 6 == (await bench.queue.backend.stats()).samples

    run(test)


def test_a_place_takes_one_group_and_a_rollout_ends_once(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        (key,) = await bench.vacant(await bench.claim())
        group = await bench.open(key)
        for call in (
            bench.open(key),
            bench.queue.open_groups([NewGroup(key=key, task_id="t", rollouts=0)]),
            bench.fail(group, 2, "there is none"),
            bench.fail("train/0/0/1", 0, "not opened"),
            bench.fail("nonsense", 0, "not a key"),
        ):
            with pytest.raises(QueueError) as refused:
                await call
            assert refused.value.code in ("queue.invalid", "queue.unknown-sample")
        first = await bench.end(group, 0)
        repeated = RolloutReport(group=group, rollout=0, keys=(*first, f"{group}/0r1/0"), written=Written(sizes=(0, 0)))
        assert (f"{group}/0r1/0",) == await bench.queue.end_rollouts([repeated]), "of a worker that made it again"
        assert first == await bench.end(group, 0)
        await bench.end(group, 1)
        assert 2 == len(await bench.lease(0))

    run(test)


def test_samples_of_open_groups_come_in_lists_and_each_once(run: Run) -> None:
    """A published group is leased instead."""

    async def test(bench: Any) -> None:
        await bench.stage()
        batch = await bench.claim(groups=2)
        await bench.publish(batch, keys=(await bench.vacant(batch))[:1])
        group = await bench.open(GroupKey("train", 0, 1))
        feed = bench.queue.new_samples("train")
        coming = asyncio.ensure_future(anext(feed))
        await bench.clock.sleep(1)
        assert await bench.end(group, 1, samples=2) == await coming
        assert ("train/0/1/0/1/0", "train/0/1/0/1/1") == await anext(bench.queue.new_samples("train"))
        coming = asyncio.ensure_future(anext(feed))
        await bench.end(group, 0)
        await bench.clock.sleep(1)
        assert not coming.done(), "its group is published"
        await bench.queue.close()
        with pytest.raises(StopAsyncIteration):
            await coming

    run(test)


def test_deadlines_name_what_has_not_ended(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        await bench.stage()
        batch = await bench.claim(groups=2)
        first, _ = await bench.vacant(batch)
        await bench.end(await bench.open(first, 3), 1)
        with pytest.raises(DeadlineExceeded) as late:
            await bench.lease(0, seconds=3)
        assert "train/0/0/0 (task 'task-0', rollouts 0, 2)" in str(late.value)
        with pytest.raises(DeadlineExceeded):
            await bench.queue.claim_batch("train", "two", 1, below=1, deadline_seconds=3)
        with pytest.raises(DeadlineExceeded) as late:
            await bench.lease(7, seconds=3)
        assert "claimed" in str(late.value)

    run(test)


def test_the_last_explorer_waits_for_what_others_may_give_back(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()

        def claim(explorer: str) -> asyncio.Future[Batch | None]:
            call = bench.queue.claim_batch("train", explorer, 1, below=2, deadline_seconds=50.0)
            return asyncio.ensure_future(call)

        first = await claim("one")
        bench.queue.caller = lambda: "client 2"
        second = await claim("two")
        bench.queue.caller = lambda: "client 1"
        await bench.publish(first)
        idle = claim("one")
        await bench.queue.ack(await bench.lease(0), step=0)
        await bench.clock.sleep(1)
        assert not idle.done(), "batch 1 may be given back"
        await bench.queue.end_holder("client 2")
        again = await idle
        assert again is not None
        assert (second.number, "one") == (again.number, again.explorer)
        await bench.publish(again)
        idle = claim("two")
        await bench.queue.ack(await bench.lease(1), step=1)
        assert await idle is None, "all below batch 2 are final"

    run(test)


def test_explorers_share_the_batches_as_they_say(run: Run) -> None:
    """With three quarters and one quarter, in any order of calls; one that is alone takes every batch."""

    async def test(bench: Any) -> None:
        await bench.trainer()
        taken = list[str]()

        async def explore(name: str, share: float, pause: float) -> None:
            while (batch := await bench.queue.claim_batch("train", name, 1, below=12, share=share)) is not None:
                taken.append(name)
                await bench.clock.sleep(pause)
                await bench.publish(batch)

        async def train() -> None:
            for number in range(12):
                await bench.queue.ack(await bench.lease(number, seconds=100), step=number)
                await bench.queue.commit(number)

        await asyncio.gather(explore("quick", 0.75, 0.1), explore("slow", 0.25, 1.0), train())
        assert {"quick": 9, "slow": 3} == Counter(taken)
        for number in (12, 13):
            batch = await bench.queue.claim_batch("train", "slow", 1, below=20, share=0.25)
            assert number == batch.number
            await bench.publish(batch)

    run(test)


def test_what_samples_were_made_of_is_remembered(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        (key,) = await bench.vacant(await bench.claim())
        group, sample = await bench.open(key, 1), key.sample(0, 0)
        written = await bench.values.put("train", [sample], bench.columns(1))
        lineage = {sample: Lineage("rewrite", ("file:1",)), "file:1": Lineage("import", ("file",))}
        report = RolloutReport(group=group, rollout=0, keys=(sample,), written=written)
        await bench.queue.end_rollouts([msgspec.structs.replace(report, lineage=lineage)])
        meta = await bench.lease(0)
        assert ("rewrite", ["file:1"]) == (meta.tags[0]["operation"], meta.tags[0]["parents"])
        assert [sample, "file:1"] == [entry["key"] for entry in bench.queue.ledger if entry["event"] == "derive"]

    run(test)
