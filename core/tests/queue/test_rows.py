"""Values that workers write past the controller: it hears of them, and decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from jackfield.errors import LeaseError, QueueError
from jackfield.queue import Rows, Written, dense_column

torch = pytest.importorskip("torch")

Run = Callable[..., None]


def rewards(count: int) -> dict[str, Any]:
    return {"reward": dense_column(torch.arange(float(count)))}


def test_a_run_ends_around_a_write_that_somebody_else_does(run: Run) -> None:
    async def test(bench: Any) -> None:
        queue, rows = bench.queue, Rows(bench.queue.backend)
        await queue.register_consumer("trainer", partition="train", columns=("ids",))
        (slot,) = await bench.vacant(await bench.claim())
        group = await queue.open_group(slot, task_id="t", runs=1)
        columns = bench.columns(2)
        written = Written(columns=("ids",), sizes=(24, 24))
        async with queue.ending_run(group, 0, written, [{"n": 0}, {"n": 1}]) as keys:
            assert written == await rows.put("train", keys, columns)
            assert 0 == len((await queue.group(group)).keys), "nobody sees a row before its values are there"
        assert keys == (await queue.group(group)).keys
        assert 48 == (await queue.stats())["bytes"]
        batch = await queue.lease("trainer", deadline_seconds=0)
        assert [0, 1] == [tags["n"] for tags in batch.tags]
        found = await rows.get("train", batch.keys, ("ids",))
        assert columns["ids"].values.tolist() == found["ids"].values.tolist()

    run(test)


def test_a_write_that_fails_leaves_the_run_to_be_ended_again(run: Run) -> None:
    """The worker died between making and storing: the run is made again, under other keys."""

    async def test(bench: Any) -> None:
        queue = bench.queue
        (slot,) = await bench.vacant(await bench.claim())
        group = await queue.open_group(slot, task_id="t", runs=1)
        with pytest.raises(ZeroDivisionError):
            async with queue.ending_run(group, 0, Written(columns=("ids",), sizes=(24,)), [{}]) as lost:
                raise ZeroDivisionError
        assert (0, 0) == ((await queue.stats())["rows"], (await queue.stats())["bytes"])
        (key,) = await bench.put(group, 0)
        assert key not in lost
        assert "published" == (await queue.group(group)).state

    run(test)


def test_announced_columns_complete_rows_as_put_ones_do(run: Run) -> None:
    async def test(bench: Any) -> None:
        queue, rows = bench.queue, Rows(bench.queue.backend)
        await queue.register_consumer("trainer", partition="train", columns=("ids", "reward"))
        (group,) = await bench.publish(await bench.claim())
        keys = (await queue.group(group)).keys
        written = await rows.put("train", keys, rewards(2))
        assert keys == await queue.announce(keys, written)
        batch = await queue.lease_groups("trainer", 0, deadline_seconds=0)
        assert keys == batch.keys
        with pytest.raises(QueueError) as caught:
            await queue.announce(keys, written)
        assert "queue.column" == caught.value.code
        await queue.announce(batch, await rows.put("train", keys, rewards(2)))  # the holder of a lease may write again
        await queue.release(batch)
        with pytest.raises(LeaseError):
            await queue.announce(batch, written)

    run(test)


def test_what_is_written_to_rows_that_went_meanwhile_is_deleted(run: Run) -> None:
    async def test(bench: Any) -> None:
        queue, rows = bench.queue, Rows(bench.queue.backend)
        (group,) = await bench.publish(await bench.claim())
        keys = (await queue.group(group)).keys
        await queue.drop_group(group, "for a test")
        await queue.flush()
        assert () == await queue.announce(keys, await rows.put("train", keys, rewards(2)))
        await queue.flush()
        assert 0 == (await queue.backend.stats()).samples

    run(test)
