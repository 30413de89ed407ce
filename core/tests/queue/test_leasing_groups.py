"""Leases, acks, commits and reuse of whole groups."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Reuse, SamplerSpec

torch = pytest.importorskip("torch")

Run = Callable[..., None]


def test_a_stage_is_done_when_its_columns_are_there(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.stage()
        await bench.trainer("ids", "reward")
        await bench.publish(await bench.claim(groups=2))
        meta = await bench.queue.lease("reward", 1, deadline_seconds=0)
        assert meta.keys[:1] == await bench.reward(meta.select([0])), "in part"
        with pytest.raises(DeadlineExceeded):
            await bench.some(1)
        await bench.reward(meta.select([1]))
        assert set(meta.groups) == set((await bench.some(1)).groups)
        acks = [entry for entry in bench.queue.ledger if entry["event"] == "ack"]
        assert [("reward", None, list(meta.keys))] == [(ack["consumer"], ack["step"], ack["keys"]) for ack in acks]
        rest = await bench.queue.lease("reward", deadline_seconds=0)
        await bench.reward([*rest.keys])  # without its lease; it ends all the same
        assert {"samples_leased": 2} == await bench.counts("samples_leased")

    run(test)


def test_groups_are_deleted_when_every_consumer_is_done_and_the_step_committed(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.stage()
        await bench.trainer("ids", "reward")
        await bench.queue.register_consumer("reader", "train", ("ids",))
        await bench.publish(await bench.claim())
        read = await bench.queue.lease("reader", deadline_seconds=0)
        await bench.queue.ack(read)
        await bench.reward(read.keys)
        meta = await bench.lease(0)
        await bench.queue.ack(meta, step=3)
        assert {"samples": 2, "batches": 1} == await bench.counts("samples", "batches")
        await bench.queue.commit(2)
        assert {"samples": 2} == await bench.counts("samples")
        await bench.queue.commit(3)
        assert {"samples": 0, "bytes": 0, "batches": 0} == await bench.counts("samples", "bytes", "batches")
        await bench.queue.flush()
        assert 0 == (await bench.queue.backend.stats()).samples
        with pytest.raises(QueueError) as consumed:
            await bench.lease(0)
        assert "queue.invalid" == consumed.value.code
        await bench.queue.ack(meta, step=4)  # of groups that are gone: nothing
        assert () == await bench.reward(read.keys)

    run(test)


def test_a_batch_is_leased_when_it_is_complete_without_the_groups_that_the_consumer_has(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim(groups=3)
        keys = await bench.vacant(batch)
        await bench.publish(batch, keys=[keys[2]])
        assert ["train/0/2/0"] == sorted(set((await bench.some(1)).groups))
        waiting = asyncio.ensure_future(bench.lease(0, seconds=5))
        await bench.publish(batch, keys=keys[:1])
        await bench.clock.sleep(1)
        assert not waiting.done()
        await bench.publish(batch, keys=keys[1:2])
        assert ["train/0/0/0", "train/0/1/0"] == sorted(set((await waiting).groups))
        with pytest.raises(QueueError):
            await bench.lease(0)

    run(test)


def test_a_lease_that_ended_is_refused(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        bench.queue.caller = lambda: "client-7"
        await bench.publish(await bench.claim(groups=2))
        first = await bench.lease(0)
        with pytest.raises(QueueError) as in_part:
            await bench.queue.ack(first.select([0]))
        assert "queue.invalid" == in_part.value.code
        await bench.queue.end_holder("client-8")
        await bench.queue.end_holder("client-7")
        for call in (bench.queue.ack(first), bench.queue.release(first), bench.reward(first)):
            with pytest.raises(QueueError) as ended:
                await call
            assert "queue.lease" == ended.value.code
        second = await bench.lease(0)
        assert first.keys == second.keys
        await bench.queue.take_over("trainer")
        third = await bench.lease(0)
        await bench.queue.release(third)
        assert third.keys == (await bench.lease(0)).keys

    run(test)


def test_a_dead_clients_batches_are_handed_out_again_and_what_it_held_is_named(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        bench.queue.caller = lambda: "client-7"
        await bench.publish(await bench.claim(explorer="zero"))
        await bench.lease(0)
        batch = await bench.claim(explorer="one")
        (key,) = await bench.vacant(batch)
        await bench.open(key)
        await bench.end(str(key), 0)
        await bench.queue.end_holder("client-7", "the explorer one")
        assert ["the explorer one held train/0/0/0, train/1/0/0/1, which others get now"] == caplog.messages
        assert 1 == (await bench.claim(explorer="two")).number

    run(test)


def test_a_column_is_written_once_without_a_lease(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        await bench.publish(await bench.claim())
        meta = await bench.lease(0)
        assert meta.keys == await bench.reward(meta)
        assert meta.keys == await bench.reward(meta), "the holder of the lease may replace it"
        size = await bench.counts("bytes")
        with pytest.raises(QueueError) as refused:
            await bench.reward(meta.keys)
        assert "queue.column" == refused.value.code
        assert size == await bench.counts("bytes")
        with pytest.raises(QueueError) as unknown:
            await bench.queue.add_columns(["train/9/0/0/0/0"], await bench.values.put("train", ["a"], bench.columns(1)))
        assert "queue.unknown-sample" == unknown.value.code

    run(test)


def test_lost_values_are_made_again_unless_they_were_used(run: Run) -> None:
    async def test(bench: Any) -> None:
        from jackfield.abc.transfer_queue import DeleteRequest

        await bench.trainer()
        batch = await bench.claim(groups=3)
        await bench.publish(batch)
        used, held = await bench.some(1), await bench.some(1)
        await bench.queue.ack(used, step=0)
        gone = [used.keys[0], held.keys[0], "train/0/2/0/0/0"]
        await bench.queue.backend.delete(DeleteRequest(partition="train", keys=tuple(gone)))
        assert {gone[0], gone[2]} == set(await bench.queue.fail_lost())
        assert [(2, 1)] == [(key.index, key.retry) for key in await bench.vacant(batch)]
        assert (gone[1],) == await bench.queue.fail_lost(held), "who holds it says so"
        assert [(1, 1)] == [(key.index, key.retry) for key in await bench.vacant(batch)]

    run(test)


def test_samples_that_are_published_while_the_backend_lists_its_own_are_not_lost(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim(groups=2)
        backend = bench.queue.backend
        list_samples = backend.keys

        async def keys(request: Any) -> Any:
            listed = await list_samples(request)
            monkeypatch.undo()
            await bench.publish(batch)
            return listed

        monkeypatch.setattr(backend, "keys", keys)
        assert () == await bench.queue.fail_lost()
        assert {"samples": 4} == await bench.counts("samples")

    run(test)


@pytest.mark.parametrize("reuse", [Reuse(max_uses=2), Reuse(cooldown=1), Reuse(capacity=1)])
def test_groups_are_used_again_within_limits(run: Run, reuse: Reuse) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer(reuse=reuse, sampler=SamplerSpec(name="sequential"))
        await bench.publish(await bench.claim(groups=2))

        async def use(step: int) -> int:
            meta = await bench.queue.lease("trainer", 2, step=step, fresh=step == 0, deadline_seconds=0)
            await bench.queue.ack(meta, step=step)
            await bench.queue.commit(step)
            return len(set(meta.groups))

        expected = {"max_uses": [2, 2, 0, 0], "cooldown": [2, 0, 2, 0], "capacity": [2, 1, 1, 1]}
        name = next(name for name in expected if getattr(reuse, name))
        assert expected[name] == [await use(step) for step in range(4)]

    run(test)


def test_too_stale_groups_are_given_up(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer(reuse=Reuse(max_staleness=1))
        for version, key in enumerate(await bench.vacant(await bench.claim(groups=3))):
            await bench.end(await bench.open(key, 1), 0, weight_version_min=version)
        meta = await bench.queue.lease("trainer", 1, step=2, deadline_seconds=0)
        assert ("train/0/1/0",) == meta.groups
        await bench.queue.commit(2)
        assert {"samples": 2} == await bench.counts("samples")

    run(test)


def test_producers_are_held_back_when_groups_are_handed_out(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim(groups=4)
        keys = await bench.vacant(batch)
        assert 2 == len(keys), "two samples each, room for four"
        waiting = asyncio.ensure_future(anext(bench.queue.groups_to_fill(batch, 50)))
        await bench.publish(batch, keys=keys)
        await bench.clock.sleep(1)
        assert not waiting.done()
        await bench.queue.drop_groups([str(keys[0])], "filtered")
        assert (0,) == tuple(key.index for key in await waiting)
        with pytest.raises(QueueError) as full:
            await anext(bench.queue.groups_to_fill(batch, 5))
        assert "queue.full" == full.value.code

    run(test, max_samples=5)


def test_what_the_trainer_waits_for_is_handed_out_though_the_queue_is_full(run: Run) -> None:
    """Acked samples are kept until their commit; a trainer that commits rarely still gets its next batch."""

    async def test(bench: Any) -> None:
        await bench.trainer()
        done: list[int] = []

        async def explore() -> None:
            while True:
                batch = await bench.claim(groups=2)
                async for keys in bench.queue.groups_to_fill(batch, 50, until="published"):
                    await bench.publish(batch, keys=keys)
                done.append(batch.number)

        exploring = asyncio.ensure_future(explore())
        for step in range(6):  # never commits
            if step % 2:
                meta = await bench.lease(step, seconds=1)
            else:
                meta = await bench.queue.lease("trainer", 2, deadline_seconds=1)
            assert 4 == len(meta)
            await bench.queue.ack(meta, step=step)
        await bench.clock.sleep(1)
        assert list(range(6)) == done
        exploring.cancel()

    run(test, max_samples=3)


def test_closing_ends_every_wait(run: Run) -> None:
    async def test(bench: Any) -> None:
        await bench.trainer()
        batch = await bench.claim()
        await bench.vacant(batch)
        waits = [
            bench.lease(0, seconds=50),
            bench.queue.lease("trainer", deadline_seconds=50),
            bench.queue.claim_batch("train", "two", 1, below=1, deadline_seconds=50),
            anext(bench.queue.groups_to_fill(batch, 50)),
            bench.queue.wait_notice("weights", 0, 50),
        ]
        tasks = [asyncio.ensure_future(each) for each in waits]
        await bench.clock.sleep(1)
        await bench.queue.close()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert ["queue.closed"] * len(tasks) == [getattr(error, "code", error) for error in found]

    run(test)


def test_a_group_that_is_given_up_at_a_committed_step_is_consumed_once(run: Run) -> None:
    """The capacity retires it when the first ack is already final."""

    async def test(bench: Any) -> None:
        await bench.trainer(reuse=Reuse(capacity=1))
        await bench.publish(await bench.claim(groups=2))
        await bench.queue.commit(5)
        await bench.queue.ack(await bench.queue.lease("trainer", 2, deadline_seconds=0), step=3)
        assert {"samples": 2} == await bench.counts("samples")
        await bench.queue.flush()

    run(test)


def test_waits_are_for_rollouts_until_the_groups_are_made_and_then_for_columns(run: Run) -> None:
    async def waited(bench: Any, made: Any, **which: Any) -> dict[str, float]:
        """Return what a lease waits for, if a group is made at second 1, the last one at 2, and all rewarded at 5."""
        first, last = await bench.vacant(made)
        await bench.queue.drain_metrics()
        leasing = asyncio.ensure_future(bench.queue.lease("trainer", deadline_seconds=60, **which))
        for key in (first, last):
            await bench.clock.sleep(1)
            await bench.publish(made, 1, [key])
        await bench.clock.sleep(3)
        await bench.reward([str(key.sample(0, 0)) for key in (first, last)])
        await bench.queue.release(await leasing)
        found = await bench.queue.drain_metrics()
        return {name: seconds for name, seconds in found.items() if name.startswith("waits/")}

    async def test(bench: Any) -> None:
        await bench.trainer("ids", "reward")
        expected = {"waits/trainer/rollouts": 2.0, "waits/trainer/columns": 3.0}
        batch = await bench.claim(groups=2)
        assert expected == await waited(bench, batch, groups=2, max_staleness=3)
        groups = ["train/0/0/0", "train/0/1/0"]
        for retry, which in enumerate(({"batch": 0}, {"batch": 0, "groups": 2}, {"again": groups})):
            await bench.queue.drop_groups([f"train/0/{index}/{retry}" for index in range(2)], "their unit died")
            assert expected == await waited(bench, batch, **which), which
        await bench.claim(groups=2)  # the same batch, which was offered again
        await bench.publish(await bench.claim(groups=2))  # groups of another one do not take their places
        await bench.queue.drop_groups([f"train/0/{index}/3" for index in range(2)], "their unit died")
        assert expected == await waited(bench, batch, again=groups)

    run(test)
