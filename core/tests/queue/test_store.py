"""The queue's store and checkpoints survive kills, and damage is detected."""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage
from jackfield.queue.records import State
from jackfield.queue.store import STORE_FILE, Store, effective_acks, read_ledger
from jackfield.queue.transfer_queue import TransferQueue
from jackfield_virtual_clock import VirtualClock

pytest.importorskip("torch")
from jackfield_queue_bench import Bench, Memory

Use = Callable[[Any], Awaitable[Any]]


def life(folder: Path, backend: Memory, use: Use, *, durable: bool = True) -> Any:
    """Return the result of ``use`` on a queue in a separate process."""
    clock = VirtualClock()

    async def main() -> Any:
        queue = TransferQueue(backend, clock, store=folder / "queue" / STORE_FILE, durable=durable)
        await queue.start()
        bench = Bench(queue, clock)
        await bench.trainer()
        try:
            return await use(bench)
        finally:
            await queue.close()

    return clock.run(main())


def first_life(checkpoint: Path) -> Use:
    async def use(bench: Any) -> None:
        await bench.queue.clear()
        await bench.publish(await bench.claim())
        await bench.queue.ack(await bench.lease(0), step=0)
        await bench.queue.checkpoint(checkpoint)
        await bench.queue.commit(0)
        await bench.publish(await bench.claim())
        await bench.queue.ack(await bench.lease(1), step=1)
        await bench.publish(await bench.claim())

    return use


def second_life(checkpoint: Path) -> Use:
    async def use(bench: Any) -> tuple[bool, int]:
        kept = await bench.queue.restore(checkpoint, 0)
        return kept, (await bench.queue.stats())["samples"]

    return use


def test_a_killed_durable_queue_keeps_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"
    life(tmp_path, backend, first_life(checkpoint))
    assert (True, 4) == life(tmp_path, backend, second_life(checkpoint))
    assert {"trainer": dict.fromkeys(("train/0/0/0/0/0", "train/0/0/0/1/0"), 0)} == effective_acks(
        read_ledger(tmp_path)
    ), "the ack of step 1 was taken back"


def test_an_ack_that_the_checkpoint_has_is_taken_back_with_its_step(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"

    async def first(bench: Any) -> None:
        await bench.queue.clear()
        await bench.publish(await bench.claim())
        await bench.queue.ack(await bench.lease(0), step=5)
        await bench.queue.checkpoint(checkpoint)

    life(tmp_path, backend, first)
    assert (True, 2) == life(tmp_path, backend, second_life(checkpoint))
    assert {} == effective_acks(read_ledger(tmp_path))


def test_a_queue_that_is_not_durable_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    life(tmp_path, Memory(), first_life(checkpoint), durable=False)
    assert (False, 0) == life(tmp_path, Memory(), second_life(checkpoint), durable=False)
    assert [0, 0] == list(effective_acks(read_ledger(tmp_path))["trainer"].values())


def test_lost_samples_of_the_checkpoint_send_the_queue_back_to_it(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"

    async def first(bench: Any) -> None:
        await bench.queue.clear()
        await bench.publish(await bench.claim())
        await bench.queue.checkpoint(checkpoint)
        await bench.publish(await bench.claim())

    life(tmp_path, backend, first)
    backend._cells.pop(("train", "train/0/0/0/1/0"))
    assert (False, 2) == life(tmp_path, backend, second_life(checkpoint))


def test_a_damaged_state_falls_back_to_the_checkpoint(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"
    life(tmp_path, backend, first_life(checkpoint))
    with sqlite3.connect(tmp_path / "queue" / STORE_FILE) as db:
        db.execute("update state set value = replace(value, 'ids', 'idx') where key != 'head'")
    assert (False, 0) == life(tmp_path, backend, second_life(checkpoint))


@pytest.mark.parametrize(
    "damage",
    [
        "update ledger set value = replace(value, '0/0/0/0/0', '0/0/0/9/0') where event = 'ack' and step = 0",
        "update ledger set step = 7 where event = 'ack' and step = 0",
        "delete from ledger where number = 1",
        "delete from ledger",
    ],
)
def test_a_damaged_ledger_is_refused(tmp_path: Path, damage: str) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"
    life(tmp_path, backend, first_life(checkpoint))
    with sqlite3.connect(tmp_path / "queue" / STORE_FILE) as db:
        assert db.execute(damage).rowcount
    with pytest.raises(QueueError) as refused:
        life(tmp_path, backend, second_life(checkpoint))
    assert "queue.ledger" == refused.value.code


def test_a_ledger_that_is_damaged_behind_the_checkpoint_is_cut_there(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"
    life(tmp_path, backend, first_life(checkpoint))
    with sqlite3.connect(tmp_path / "queue" / STORE_FILE) as db:
        db.execute("update ledger set value = 'x' where event = 'ack' and step = 1")
    assert (True, 4) == life(tmp_path, backend, second_life(checkpoint))
    assert [0, 0] == list(effective_acks(read_ledger(tmp_path))["trainer"].values())


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "row"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, damage: str) -> None:
    checkpoint = tmp_path / "checkpoint"
    life(tmp_path, Memory(), first_life(checkpoint))
    file = checkpoint / STORE_FILE
    content = file.read_bytes()
    if damage == "remove":
        file.unlink()
    elif damage == "row":
        with sqlite3.connect(file) as db:
            db.execute("delete from state where key != 'head'")
    else:
        at = content.index(b"task-0")
        file.write_bytes(
            content[: len(content) // 2] if damage == "cut" else content[:at] + b"fake" + content[at + 4 :]
        )
    with pytest.raises(QueueError) as refused:
        life(tmp_path, Memory(), second_life(checkpoint))
    assert "queue.invalid" == refused.value.code


def test_values_that_were_put_and_not_reported_are_deleted_at_the_next_checkpoint(tmp_path: Path) -> None:
    backend = Memory()

    async def use(bench: Any) -> None:
        await bench.queue.clear()
        batch = await bench.claim(groups=2)
        first, second = await bench.vacant(batch)
        await bench.publish(batch, keys=[first])
        for group in (await bench.open(second), "train/7/0/0"):
            await bench.values.put("train", [f"{group}/0/0"], bench.columns(1))
        await bench.queue.checkpoint(tmp_path / "checkpoint")
        left = {"train/0/0/0/0/0", "train/0/0/0/1/0", "train/0/1/0/0/0"}
        assert left == {key for _, key in backend._cells}, "the worker of the open group may still report"

    life(tmp_path, backend, use)


def test_clear_forgets_everything_even_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    backend, checkpoint = Memory(), tmp_path / "checkpoint"
    life(tmp_path, backend, first_life(checkpoint))
    (tmp_path / "queue" / STORE_FILE).write_bytes(b"no database at all" * 100)

    async def use(bench: Any) -> Any:
        await bench.queue.clear()
        assert 0 == (await bench.claim()).number
        return (await bench.queue.stats())["samples"], (await backend.stats()).samples

    assert (0, 0) == life(tmp_path, backend, use)


def test_after_a_failed_write_the_queue_refuses_to_go_on(tmp_path: Path) -> None:
    async def use(bench: Any) -> None:
        await bench.queue.clear()
        bench.queue._core.store._db.execute("pragma query_only=1")  # as a full disk
        for _ in range(2):
            with pytest.raises(QueueError) as refused:
                await bench.queue.commit(0)
            assert "queue.store" == refused.value.code

    life(tmp_path, Memory(), use)


def test_a_checkpoint_of_a_step_leaves_out_what_is_to_be_made_again(tmp_path: Path) -> None:
    async def use(bench: Any) -> None:
        await bench.queue.clear()
        for _ in range(3):
            await bench.publish(await bench.claim())
        await bench.queue.checkpoint(tmp_path / "c", {"train": 1})
        assert not await bench.queue.restore(tmp_path / "c")
        assert 2 == (await bench.queue.stats())["samples"]
        assert [0, 1] == [(await bench.claim()).number for _ in range(2)]
        await bench.queue.flush()

    life(tmp_path, Memory(), use, durable=False)


def test_the_log_of_transactions_ends_anywhere(tmp_path: Path) -> None:
    """Each prefix of the log gives the state after a complete call, with valid digests and all rows."""

    async def use(bench: Any) -> None:
        await first_life(tmp_path / "checkpoint")(bench)
        path = tmp_path / "queue" / STORE_FILE
        log = path.with_name(f"{STORE_FILE}-wal").read_bytes()
        for end in range(0, len(log), len(log) // 23):
            part = tmp_path / f"part-{end}" / STORE_FILE
            part.parent.mkdir()
            part.write_bytes(path.read_bytes())
            part.with_name(f"{STORE_FILE}-wal").write_bytes(log[:end])
            store = Store(part, durable=True)
            assert State.load(store.rows()).marks is not None
            list(store.entries())
            store.close()

    life(tmp_path, Memory(), use)


def test_what_cannot_be_written_leaves_the_ledger_whole(tmp_path: Path) -> None:
    """The entries of a rolled-back transaction are written by the next one."""

    async def use(bench: Any) -> None:
        await bench.queue.clear()
        tag = {"x": object()}
        group = await bench.open((await bench.vacant(await bench.claim()))[0], 1, tag=tag)
        with pytest.raises(ValueError, match="attrs"):
            await bench.report(group, 0, bench.columns(1), made=Lineage("repair", ("elsewhere",)))
        tag["x"] = 1
        await bench.queue.commit(0)
        assert "commit" == list(bench.queue.ledger)[-1]["event"]

    life(tmp_path, Memory(), use)
