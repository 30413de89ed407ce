"""Samplers, reuse and staleness; with the cases that Trinity-RFT and verl's TransferQueue document and test.

Where ours differs on purpose, docs/guides/replay_and_mixing.md says how.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue import BatchMeta, Ready, Sampler, TransferQueue
from jackfield.queue.meta import SAMPLERS, Priority, Random, Reuse, SamplerSpec, Sequential, register_sampler
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.sdk.cells import dense_column
from jackfield_testing import refused

torch = pytest.importorskip("torch")

Run = Callable[..., None]


async def publish(bench: Any, versions: Sequence[int | None], rows: int = 2) -> None:
    """Publish one batch with a group of ``rows`` samples per version."""
    for key, version in zip(await bench.vacant(await bench.claim(groups=len(versions))), versions, strict=True):
        tags = {} if version is None else {"weight_version_min": version, "weight_version_max": version}
        await bench.end(await bench.open(key, 1), 0, rows, **tags)


def versions(batch: BatchMeta) -> list[int]:
    """Return the version of each group of a batch, in order."""
    groups = dict(zip(batch.groups, batch.tags, strict=True))
    return [tags["weight_version_min"] for tags in groups.values()]


async def use(bench: Any, groups: int, step: int, **options: Any) -> list[int]:
    """Sample and ack groups; return their versions."""
    batch = await bench.queue.lease("trainer", groups, step=step, deadline_seconds=0, **options)
    await bench.queue.ack(batch, step=step)
    return versions(batch)


def spec_of(sampler: Sampler) -> SamplerSpec:
    (name,) = [name for name, make in SAMPLERS.items() if make is type(sampler)]
    fields = attrs.fields(type(sampler))  # type: ignore[misc]
    return SamplerSpec(name=name, options={field.name: getattr(sampler, field.name) for field in fields if field.init})


async def register(bench: Any, sampler: Sampler | None = None, reuse: Reuse | None = None) -> None:
    await bench.queue.register_consumer("trainer", "train", ("ids",), sampler=sampler and spec_of(sampler), reuse=reuse)


# -- Trinity-RFT: the priority queue of its experience buffer


def test_priority_decays_with_each_use(run: Run) -> None:
    """The priority is the version minus 0.6 per use, for two of five groups; ties go to the older group."""

    async def test(bench: Any) -> None:
        await register(bench, Priority(decay=0.6), Reuse())
        await publish(bench, [1, 2, 3, 4])
        found = [await use(bench, 2, step) for step in range(6)]
        # priorities before each draw, of versions 1, 2, 3, 4:
        #   1 2 3 4 | 1 2 2.4 3.4 | 1 2 1.8 2.8 | 1 1.4 1.8 2.2 | 1 1.4 1.2 1.6 | 1 0.8 1.2 1
        assert [[4, 3], [4, 3], [4, 2], [4, 3], [4, 2], [3, 1]] == found

    run(test)


def test_a_group_is_used_as_often_as_it_may_and_then_deleted(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench, Priority(decay=1.2), Reuse(max_uses=2))
        await publish(bench, [1, 2, 3, 4])
        assert [4, 3] == await use(bench, 2, 0)
        assert [4, 2] == await use(bench, 2, 1)
        await bench.queue.commit(1)
        assert 6 == (await bench.queue.stats())["samples"], "the newest is used up"
        assert [3, 1] == await use(bench, 2, 2)
        await bench.queue.commit(2)
        assert 4 == (await bench.queue.stats())["samples"]
        assert [2, 1] == await use(bench, 2, 3)
        await bench.queue.commit(3)
        assert 0 == (await bench.queue.stats())["samples"]
        with refused("deadline", "'trainer'"):
            await use(bench, 2, 4)

    run(test)


def test_without_reuse_a_group_is_given_once_newest_first(run: Run) -> None:
    """Unlike in a priority queue of fixed capacity, a newer group never evicts an unused one."""

    async def test(bench: Any) -> None:
        await register(bench, Priority(decay=0.6))
        await publish(bench, list(range(12)), rows=1)
        assert [11, 10, 9, 8, 7, 6, 5, 4] == await use(bench, 8, 12)
        assert [3, 2, 1, 0] == await use(bench, 4, 13)
        with pytest.raises(DeadlineExceeded):
            await use(bench, 1, 14)

    run(test)


def test_capacity_keeps_the_used_groups_that_the_sampler_prefers(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench, Priority(decay=0.1), Reuse(capacity=2))
        await publish(bench, [5, 1, 4, 2])
        assert [5, 4, 2, 1] == await use(bench, 4, 6)
        assert [5, 4] == await use(bench, 4, 7, fresh=False)
        await bench.queue.commit(7)
        assert 4 == (await bench.queue.stats())["samples"], "the others are gone with the commit"

    run(test)


def test_a_used_group_rests(run: Run) -> None:
    """The cooldown is counted in steps, so that a resumed run chooses the same groups."""

    async def test(bench: Any) -> None:
        await register(bench, Priority(decay=0.0), Reuse(cooldown=2))
        await publish(bench, [1, 2])
        assert [2] == await use(bench, 1, 0)
        assert [1] == await use(bench, 1, 1)
        assert [] == await use(bench, 1, 2, fresh=False)
        assert [2] == await use(bench, 2, 3, fresh=False)
        assert [1] == await use(bench, 2, 4, fresh=False)

    run(test)


@pytest.mark.parametrize("sampler", [Sequential(), Priority()], ids=["sequential", "priority"])
def test_what_is_too_stale_is_let_go(run: Run, sampler: Sampler) -> None:
    """At step 15 a bound of 3 keeps versions from 12 on. Samples without a version are never stale."""

    async def test(bench: Any) -> None:
        await register(bench, sampler, Reuse(max_uses=1, max_staleness=3))
        await publish(bench, [*range(15), None], rows=1)
        batch = await bench.queue.lease("trainer", 4, step=15, deadline_seconds=0)
        assert {12, 13, 14, None} == {tags.get("weight_version_min") for tags in batch.tags}
        with pytest.raises(DeadlineExceeded):
            await use(bench, 1, 15)
        (retired,) = [entry for entry in bench.queue.ledger if entry["event"] == "retire"]
        assert (12, 15, "trainer") == (len(retired["keys"]), retired["step"], retired["consumer"])
        assert 16 == (await bench.queue.stats())["samples"], "until the commit"
        await bench.queue.commit(15)
        assert 4 == (await bench.queue.stats())["samples"]

    run(test)


def test_a_wait_for_groups_ends_when_there_are_enough(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench, Priority())
        waiting = asyncio.ensure_future(bench.queue.lease("trainer", 3, step=0, deadline_seconds=9))
        await publish(bench, [0, 1])
        await asyncio.sleep(0)
        assert not waiting.done()
        await publish(bench, [2])
        assert [2, 1, 0] == versions(await waiting)

    run(test)


def test_a_wait_for_groups_ends_when_one_may_be_used_again(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench, reuse=Reuse())
        await publish(bench, [3])
        batch = await bench.queue.lease("trainer", 1, step=0, deadline_seconds=0)
        waiting = asyncio.ensure_future(bench.queue.lease("trainer", 1, step=1, deadline_seconds=9))
        await asyncio.sleep(0)
        assert not waiting.done()
        await bench.queue.ack(batch, step=0)
        assert [3] == versions(await waiting)
        assert 0 == bench.clock.time()

    run(test)


# -- verl: the samplers of its TransferQueue


def test_sequential_gives_what_there_is_in_order(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench)
        await publish(bench, [7, 3, 9, 5, 1])
        assert [7, 3, 9] == await use(bench, 3, 0)
        rest = await bench.queue.lease("trainer", None, step=1, deadline_seconds=0)
        assert [5, 1] == versions(rest), "all that are ready"

    run(test)


def test_groups_are_whole_by_their_id_never_by_neighbouring_numbers(run: Run) -> None:
    """Samples of a group may be apart, and group sizes may differ; an incomplete group waits."""

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("trainer", "train", ("ids", "reward"))
        vacant = await bench.vacant(await bench.claim(groups=3))
        sizes = (3, 2, 3)
        groups = [await bench.open(key, size) for key, size in zip(vacant, sizes, strict=True)]
        keys: dict[str, list[str]] = {group: [] for group in groups}
        for number in range(3):  # siblings come between each other
            for group, size in zip(groups, sizes, strict=True):
                if number < size:
                    keys[group] += await bench.end(group, number)
        for group in groups:
            await bench.reward(keys[group][: 2 if group == groups[0] else 3])
        batch = await bench.queue.lease("trainer", 2, step=0, deadline_seconds=0)
        assert tuple(keys[groups[1]] + keys[groups[2]]) == batch.keys
        with refused("deadline", keys[groups[0]][2]):
            await bench.queue.lease("trainer", 1, step=0, deadline_seconds=0)
        await bench.reward(keys[groups[0]][2:])
        assert tuple(keys[groups[0]]) == (await bench.queue.lease("trainer", 1, step=0, deadline_seconds=0)).keys

    run(test)


def test_partitions_and_consumers_have_their_own_progress(run: Run) -> None:
    """Each of two consumers gets each sample of its partition once, and none of another partition."""
    partitions = ("train", "eval", "expert", "human")

    async def test(bench: Any) -> None:
        for partition in partitions:
            await bench.publish(await bench.claim(2, partition=partition), rollouts=1)
        for partition in partitions:
            for name in (f"{partition}-a", f"{partition}-b"):
                await bench.queue.register_consumer(name, partition, ("ids",))
                taken = await bench.queue.lease(name, 2, step=0, deadline_seconds=0)
                assert (f"{partition}/0/0/0/0/0", f"{partition}/0/1/0/0/0") == taken.keys
                with pytest.raises(DeadlineExceeded):
                    await bench.queue.lease(name, 1, step=0, deadline_seconds=0)

    run(test)


# -- seeds, checkpoints, plugins


def test_random_draws_follow_from_the_seed_alone(run: Run) -> None:
    draws: dict[int, list[list[int]]] = {0: [], 1: []}

    def drawing(seed: int) -> Callable[[Any], Any]:
        async def test(bench: Any) -> None:
            await register(bench, Random(seed=seed), Reuse())
            await publish(bench, list(range(16)), rows=1)
            draws[seed].append([version for step in range(8) for version in await use(bench, 2, step)])

        return test

    for seed in (0, 0, 1):
        run(drawing(seed))
    assert draws[0][0] == draws[0][1] != draws[1][0]
    assert set(draws[0][0]) <= set(range(16))
    assert len(set(draws[0][0])) > 4


@pytest.mark.parametrize("sampler", ["random", "priority"])
def test_a_restored_queue_samples_what_it_would_have_sampled(run: Run, tmp_path: Path, sampler: str) -> None:
    """The checkpoint has uses, cooldowns and the number of draws; later draws are repeated."""
    options = {"seed": 3, **({"sigma": 2.0, "decay": 1.0} if sampler == "priority" else {})}

    async def test(bench: Any) -> None:
        async def begin(queue: TransferQueue) -> None:
            reuse = Reuse(max_uses=3, cooldown=1, capacity=7)
            made = SamplerSpec(name=sampler, options=options)
            await queue.register_consumer("trainer", "train", ("ids",), sampler=made, reuse=reuse)

        await begin(bench.queue)
        await publish(bench, list(range(8)), rows=1)
        for step in range(3):
            await use(bench, 3, step)
        await bench.queue.commit(1)
        await bench.queue.checkpoint(tmp_path)
        ahead = [await use(bench, 2, step, fresh=False) for step in range(3, 8)]
        assert any(ahead)
        backend = MemoryBackend(MemoryConfig(), TransferQueueContext())
        other = type(bench)(TransferQueue(backend, bench.clock), bench.clock)
        await other.queue.start()
        await begin(other.queue)
        await other.queue.restore(tmp_path)
        assert ahead == [await use(other, 2, step, fresh=False) for step in range(3, 8)]
        await other.queue.commit(7)
        await bench.queue.commit(7)
        assert await bench.queue.stats() == await other.queue.stats()
        await other.queue.close()

    run(test)


def test_a_used_group_that_is_given_back_waits_for_its_next_use(run: Run) -> None:
    async def test(bench: Any) -> None:
        await register(bench, reuse=Reuse())
        await publish(bench, [0])
        await use(bench, 1, 0)
        for step in (1, 2):
            batch = await bench.queue.lease("trainer", 1, step=step, fresh=False)
            assert 0 == len(await bench.queue.lease("trainer", 1, step=step, fresh=False)), "it is leased"
            with pytest.raises(QueueError):
                await bench.queue.release(batch.select([0]))
            await bench.queue.release(batch)
        assert 2 == len(await bench.queue.lease("trainer", 1, step=3, fresh=False))

    run(test)


def test_a_batch_of_several_partitions_is_read_written_and_acked_as_one(run: Run) -> None:
    async def test(bench: Any) -> None:
        batches = []
        for partition, value in (("train", 3), ("expert", 5)):
            await bench.queue.register_consumer(partition, partition, ("ids",))
            await bench.publish(await bench.claim(2, partition=partition), rollouts=value - 1)
            batches.append(await bench.queue.lease(partition, 2, step=0, deadline_seconds=0))
        batch = batches[0].joined(batches[1]).select([5, 0, 4, 1, 2, 3, 6, 7, 8, 9, 10, 11])
        numbers = torch.arange(12, dtype=torch.float32)
        written = await bench.values.write(batch, {"advantages": dense_column(numbers)})
        assert batch.keys == await bench.queue.add_columns(batch, written)
        found = await bench.values.read(batch, ("advantages", "ids"))
        assert torch.equal(numbers, found["advantages"].values)
        await bench.queue.ack(batch, step=0)
        assert {"train", "expert"} == {e["consumer"] for e in bench.queue.ledger if e["event"] == "ack"}

    run(test)


def test_a_sampler_of_a_plugin_has_typed_options() -> None:
    @attrs.define(kw_only=True)
    class Last(Sampler):
        most: int = 1

        def sample(self, ready: Ready, count: int | None) -> Sequence[str]:
            return list(ready)[-self.most :]

    register_sampler("last", Last)
    try:
        made = SamplerSpec(name="last", options={"most": 2}).make()
        assert isinstance(made, Last)
        assert 2 == made.most
        with refused("config.unknown-key", "mots"):
            SamplerSpec(name="last", options={"mots": 2}).make(where="mixing.replay.sampler.options")
        with refused("queue.invalid", "'last'"):
            register_sampler("last", Sequential)
    finally:
        del SAMPLERS["last"]
