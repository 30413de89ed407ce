"""A checkpoint of the queue and what comes back from it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue import LocalQueue, dense_column
from jackfield.queue.memory import MemoryBackend, MemoryConfig

torch = pytest.importorskip("torch")

Run = Callable[..., None]


async def another(bench: Any, folder: Path) -> Any:
    """The queue of the next process."""
    queue = LocalQueue(MemoryBackend(MemoryConfig(), TransferQueueContext()), bench.clock)
    await queue.start()
    await queue.register_consumer("reward", partition="train", columns=("ids",))
    await queue.restore(folder)
    return type(bench)(queue, bench.clock)


async def consumers(bench: Any) -> None:
    await bench.queue.register_consumer("reward", partition="train", columns=("ids",))
    await bench.queue.register_consumer("trainer", partition="train", columns=("ids", "reward"))


def test_a_restored_queue_goes_on_where_the_checkpoint_was(run: Run, tmp_path: Path) -> None:
    """Acked rows stay acked, leased ones are ready again, a row without its reward still waits for it."""

    async def test(bench: Any) -> None:
        await consumers(bench)
        for _ in range(2):
            ticket = await bench.claim(groups=2)
            await bench.publish(ticket, runs=2)
        rewarding = await bench.queue.lease("reward", max_samples=6, deadline_seconds=0)
        await bench.queue.put(rewarding, {"reward": dense_column(torch.arange(6.0))}, tags=[{"score": 1.0}] * 6)
        await bench.queue.ack(rewarding, step=0)
        trained = await bench.queue.lease_groups("trainer", 0, deadline_seconds=0)
        await bench.queue.ack(trained, step=0)
        leased = await bench.queue.lease("trainer", deadline_seconds=0)
        assert 2 == len(leased)
        await bench.queue.checkpoint(tmp_path)
        await bench.queue.commit(0)

        new = await another(bench, tmp_path)
        assert () == await new.queue.rollback(0)
        await new.queue.commit(0)
        await new.queue.flush()
        assert {"rows": 4, "tickets": 1}.items() <= (await new.queue.stats()).items()
        assert 4 == (await new.queue.backend.stats()).samples
        rest = await new.queue.lease("reward", deadline_seconds=0)
        assert ("train/1/1/0/0/0", "train/1/1/0/1/0") == rest.keys
        with pytest.raises(DeadlineExceeded, match=r"2 rows lack columns: train/1/1/0/0/0 \(reward\)"):
            await new.queue.lease_groups("trainer", 1, deadline_seconds=0)
        await new.queue.put(rest, {"reward": dense_column(torch.zeros(2))})
        batch = await new.queue.lease_groups("trainer", 1, deadline_seconds=0)
        assert [1.0, 1.0, None, None] == [tags.get("score") for tags in batch.tags]
        assert [4.0, 5.0, 0.0, 0.0] == (await new.queue.get(batch, ("reward",)))["reward"].values.tolist()
        assert 1 == (await new.claim()).number, "it could still be lost"
        await new.queue.ack(batch, step=1)
        assert 2 == (await new.claim()).number
        await new.queue.close()

    run(test)


def test_unfinished_tickets_are_made_again_and_the_ledger_says_so(run: Run, tmp_path: Path) -> None:
    async def test(bench: Any) -> None:
        await consumers(bench)
        ticket = await bench.claim(groups=3)
        first, second, third = await bench.vacant(ticket)
        await bench.publish(ticket, slots=[first])
        await bench.queue.drop_group("train/0/0/0", "filtered")
        (refill,) = await bench.vacant(ticket)
        await bench.publish(ticket, slots=[refill])
        await bench.put(await bench.queue.open_group(second, task_id="t", runs=2), 0)
        await bench.queue.open_group(third, task_id="t", runs=2)
        await bench.queue.checkpoint(tmp_path)

        new = await another(bench, tmp_path)
        await new.queue.flush()
        assert 2 == (await new.queue.backend.stats()).samples  # the open group's row is not kept
        assert [("release", [1, 2])] == [(entry["event"], entry["slots"]) for entry in new.queue.ledger]
        again = await new.claim(groups=9)
        assert (0, 3) == (again.number, again.groups)
        slots = await new.vacant(again)
        assert [(1, 0, 1), (2, 0, 1)] == [(slot.index, slot.attempt, slot.claim) for slot in slots]
        await new.publish(again, slots=slots)
        keys = [
            key
            for group in ("train/0/0/1", "train/0/1/0r1", "train/0/2/0r1")
            for key in (await new.queue.group(group)).keys
        ]
        await new.reward(keys)
        assert tuple(keys) == (await new.queue.lease_groups("trainer", 0, deadline_seconds=0)).keys
        await new.queue.close()

    run(test)


def test_a_checkpoint_is_not_torn_by_what_happens_while_it_is_written(run: Run, tmp_path: Path) -> None:
    """Producers and the trainer go on; what is consumed meanwhile is in the checkpoint with its values."""

    async def test(bench: Any) -> None:
        await consumers(bench)
        await bench.publish(await bench.claim(), runs=2)
        store, started, go_on = bench.queue.backend.checkpoint, asyncio.Event(), asyncio.Event()

        async def slow(request: Any) -> Any:
            started.set()
            await go_on.wait()
            return await store(request)

        bench.queue.backend.checkpoint = slow
        writing = asyncio.ensure_future(bench.queue.checkpoint(tmp_path))
        await started.wait()
        await bench.queue.drop_group("train/0/0/0", "filtered")
        await bench.publish(await bench.claim(), runs=2)
        await bench.clock.sleep(1)
        go_on.set()
        await writing
        await bench.queue.flush()
        assert 2 == (await bench.queue.backend.stats()).samples
        new = await another(bench, tmp_path)
        batch = await new.queue.lease("reward", deadline_seconds=0)
        assert ("train/0/0/0/0/0", "train/0/0/0/1/0") == batch.keys
        assert 2 == len(await new.queue.get(batch, ("ids",)) and batch)
        await new.queue.close()

    run(test)


def test_state_is_plain_json_and_comes_back_equal(run: Run, tmp_path: Path) -> None:
    async def test(bench: Any) -> None:
        await consumers(bench)
        await bench.publish(await bench.claim(groups=2), runs=2)
        batch = await bench.queue.lease("reward", max_samples=1, deadline_seconds=0)
        await bench.queue.ack(batch)
        saved = bench.queue.state_dict()
        bench.queue.load_state_dict(json.loads(json.dumps(saved)))
        assert saved == bench.queue.state_dict()
        assert 3 == len(await bench.queue.lease("reward", deadline_seconds=0))
        with pytest.raises(QueueError, match="another format"):
            bench.queue.load_state_dict({**saved, "format": 0})
        with pytest.raises(QueueError, match="no checkpoint"):
            await bench.queue.restore(tmp_path)

    run(test)


def test_a_cleared_queue_is_a_new_one(run: Run, tmp_path: Path) -> None:
    """What its backend held before is gone, keys begin anew, leases of before are refused."""

    async def test(bench: Any) -> None:
        await bench.queue.register_consumer("a", partition="train", columns=("ids",))
        await bench.publish(await bench.claim(), runs=2)
        batch = await bench.queue.lease("a", 1, deadline_seconds=0)
        await bench.queue.clear(tmp_path / "empty")
        assert not (tmp_path / "empty").exists()
        assert 0 == (await bench.queue.backend.stats()).samples == (await bench.queue.stats())["rows"]
        assert 0 == (await bench.claim()).number
        with pytest.raises(QueueError):
            await bench.queue.ack(batch)
        assert ["clear"] == [entry["event"] for entry in bench.queue.ledger][-1:]

    run(test)


def test_a_backend_that_cannot_forget_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    async def test(bench: Any) -> None:
        async def restore(request: Any) -> None:
            raise QueueError("another format")

        await bench.publish(await bench.claim(), runs=2)
        bench.queue.backend.restore = restore
        with pytest.raises(QueueError, match=r"(?s)holds rows of an earlier run.*2 rows, 48 bytes") as caught:
            await bench.queue.clear(tmp_path / "empty")
        assert "queue.store" == caught.value.code

    run(test)
