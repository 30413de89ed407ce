"""Several processes and several units: who shares what with whom, and what happens when one of them dies."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import (
    DeleteRequest,
    GetRequest,
    KeysRequest,
    PutRequest,
    SnapshotRequest,
    TransferQueueContext,
)
from jackfield.errors import QueueError
from jackfield.queue.values import MemoryBackend, MemoryConfig
from jackfield.sdk.cells import dense_column
from jackfield_joining import check_values_go_straight
from jackfield_testing import in_loop, refused
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig

WIDE = 1 << 16  #: float32 of a row: 256 KiB

#: Joins the queue of the folder, and does what it is told: puts a row, or reads one and keeps it.
_OTHER = """
import asyncio, sys, torch
from jackfield.abc.transfer_queue import GetRequest, PutRequest, TransferQueueContext
from jackfield.sdk.cells import dense_column
from jackfield_transport_zmq.backend import ZMQBackend
from jackfield_transport_zmq.config import QueueConfig

async def main():
    backend = ZMQBackend(QueueConfig(join=sys.argv[1]), TransferQueueContext())
    await backend.start()
    kept = []
    print("joined", flush=True)
    for line in sys.stdin:
        word, key, value = line.split()
        if word == "put":
            column = dense_column(torch.full((1, 1 << 16), float(value)))
            await backend.put(PutRequest(partition="p", keys=(key,), columns={"x": column}))
            print("put", flush=True)
        else:
            found = await backend.get(GetRequest(partition="p", keys=(key,), columns=("x",)))
            kept.append(found)
            print(float(found.columns["x"].values[0, -1]), flush=True)

asyncio.run(main())
"""


def wide(*values: float) -> Any:
    return dense_column(torch.tensor(values)[:, None].repeat(1, WIDE))


async def put(backend: ZMQBackend, keys: list[str], column: Any, name: str = "x") -> None:
    await backend.put(PutRequest(partition="p", keys=tuple(keys), columns={name: column}))


async def get(backend: ZMQBackend, keys: list[str], name: str = "x") -> torch.Tensor:
    return (await backend.get(GetRequest(partition="p", keys=tuple(keys), columns=(name,)))).columns[name].values


async def delete(backend: ZMQBackend, keys: list[str]) -> int:
    return (await backend.delete(DeleteRequest(partition="p", keys=tuple(keys)))).samples


def units(backend: ZMQBackend) -> list[int]:
    """Their processes."""
    assert backend._client is not None
    return [unit.pid for unit in backend._client.directory.units]


def home(backend: ZMQBackend, key: str) -> int:
    assert backend._client is not None
    return backend._client.directory.places("p", key)[0]


class Other:
    """Another process, which the test talks to."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-c", _OTHER, str(folder / "queue" / "units.json")]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    async def hear(self) -> str:
        assert self.process.stdout is not None
        return (await asyncio.to_thread(self.process.stdout.readline)).strip()

    async def ask(self, *words: object) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return await self.hear()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@in_loop
async def test_another_process_puts_reads_and_is_killed(opened: Any, tmp_path: Path) -> None:
    """What a dead producer has put stays; what a dead reader held is free again."""
    async with opened(shared_max_bytes=4 * WIDE * 4 + 1024, seconds=20.0) as backend:
        others = [Other(tmp_path), Other(tmp_path)]
        assert ["joined", "joined"] == [await other.hear() for other in others]
        assert "put" == await others[0].ask("put", "theirs", 7)
        others[0].kill()
        assert [7.0] == (await get(backend, ["theirs"]))[:, -1].tolist()
        await put(backend, ["a", "b", "c", "d"], wide(1, 2, 3, 4))  # all that we may have
        assert "3.0" == await others[1].ask("get", "c", 0)
        assert 4 == await delete(backend, ["a", "b", "c", "d"])
        waiting = asyncio.ensure_future(put(backend, ["e", "f", "g", "h"], wide(5, 6, 7, 8)))
        assert 0 == (await backend.stats()).samples - 1  # the other still shows what it has read
        assert not waiting.done()
        others[1].kill()
        await waiting
        assert [5.0, 8.0] == (await get(backend, ["e", "h"]))[:, 0].tolist()


@in_loop
async def test_a_killed_unit_fails_exactly_its_rows_by_name(opened: Any, tmp_path: Path) -> None:
    keys = [f"row-{number}" for number in range(24)]
    async with opened(units=3, shared_from_bytes=None) as backend:
        joined = ZMQBackend(QueueConfig(join=str(tmp_path / "queue" / "units.json")), TransferQueueContext(folder=None))
        await joined.start()
        await put(backend, keys, dense_column(torch.arange(24.0)))
        lost = [key for key in keys if home(backend, key) == 1]
        kept = [key for key in keys if key not in lost]
        assert lost
        assert kept
        os.kill(units(backend)[1], signal.SIGSTOP)
        waiting = [asyncio.ensure_future(get(each, keys)) for each in (backend, joined)]
        os.kill(units(backend)[1], signal.SIGKILL)
        for task in waiting:
            with pytest.raises(QueueError) as caught:
                await task
            assert ("queue.lost", lost) == (caught.value.code, caught.value.found)
            assert "storage unit 1 died" in str(caught.value)
        for each in (backend, joined):
            assert [float(keys.index(key)) for key in kept] == (await get(each, kept)).tolist()
            for key in lost:
                with refused("queue.lost", key) as caught:
                    await get(each, [key])
                assert "queue.lost" == caught.value.code
        await put(joined, lost[:1], dense_column(torch.ones(1)), "reward")  # a column alone is no row
        there = {("p", key): ("x",) for key in kept} | {("p", lost[0]): ("reward",)}
        for each in (backend, joined):
            assert there == (await each.keys(KeysRequest())).samples
        await put(joined, lost, dense_column(torch.arange(float(len(lost)))))  # made anew, elsewhere
        assert {*keys} == {
            key for (_, key), names in (await backend.keys(KeysRequest())).samples.items() if "x" in names
        }
        assert list(map(float, range(len(lost)))) == (await get(backend, lost)).tolist()
        stats = await backend.stats()
        assert (24, 2.0, 1.0) == (stats.samples, stats.details["units"], stats.details["lost units"])
        assert 24 == await delete(backend, keys)
        await joined.close()


@in_loop
async def test_a_unit_that_dies_between_its_answer_and_the_look_at_its_memory(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(units=2) as backend:
        await put(backend, ["a", "b", "c", "d"], wide(1.0, 2.0, 3.0, 4.0))
        unit = home(backend, "a")
        found = backend._reader.found

        def killed_first(*arguments: Any) -> Any:
            with suppress(ProcessLookupError):
                os.kill(units(backend)[unit], signal.SIGKILL)
                ended = os.pidfd_open(units(backend)[unit])
                select.select([ended], [], [])
                os.close(ended)
            return found(*arguments)

        monkeypatch.setattr(backend._reader, "found", killed_first)
        with pytest.raises(QueueError) as caught:
            await get(backend, ["a"])
        assert ("queue.lost", ["a"]) == (caught.value.code, caught.value.found)


@in_loop
async def test_the_last_unit_is_replaced_when_it_dies(opened: Any) -> None:
    """Its rows are lost, by name; new ones go into the unit that takes its place, from who joined as well."""
    async with opened() as backend:
        joined = ZMQBackend(QueueConfig(), TransferQueueContext(folder=backend.context.folder, joins=True))
        await joined.start()
        await put(backend, ["old"], wide(1))
        os.kill(units(backend)[0], signal.SIGSTOP)
        waiting = asyncio.ensure_future(put(backend, ["a"], wide(1)))
        await asyncio.sleep(0)
        os.kill(units(backend)[0], signal.SIGKILL)
        with pytest.raises(QueueError) as caught:
            await waiting
        assert "a" in str(caught.value.where)
        assert "queue.lost" == caught.value.code
        await asyncio.gather(put(joined, ["b"], wide(2)), put(backend, ["a"], wide(1)))
        for one in (backend, joined):
            assert [1.0, 2.0] == (await get(one, ["a", "b"]))[:, -1].tolist()
            with refused("queue.lost", "old"):
                await get(one, ["old"])
        assert {("p", "a"), ("p", "b")} == (await joined.keys(KeysRequest())).samples.keys()
        os.kill(units(backend)[1], signal.SIGKILL)
        with suppress(QueueError):  # it may have been on its way into the unit
            await put(joined, ["c"], wide(3))
        await put(joined, ["c"], wide(3))
        assert 3.0 == (await get(backend, ["c"]))[0, -1]
        assert 3 == len(units(backend))
        await joined.close()


@in_loop
async def test_when_all_units_are_dead_and_none_can_be_started_it_is_said(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise QueueError("no process can be started")

    async with opened(seconds=0.2) as backend:
        monkeypatch.setattr("jackfield_transport_zmq.backend.started", fail)
        os.kill(units(backend)[0], signal.SIGKILL)
        with refused(("queue.lost", "queue.unreachable")):
            await put(backend, ["a"], wide(1))
        with refused("queue.unreachable", "storage units"):
            await put(backend, ["a"], wide(1))


@in_loop
async def test_a_unit_that_hangs_is_named_at_the_deadline(opened: Any) -> None:
    async with opened(seconds=0.3) as backend:
        await put(backend, ["a"], wide(1))
        os.kill(units(backend)[0], signal.SIGSTOP)
        try:
            for call in (put(backend, ["b"], wide(2)), get(backend, ["a"])):
                with refused("queue.unreachable", "storage unit 0", units(backend)[0]) as caught:
                    await call
                assert "queue.unreachable" == caught.value.code
        finally:
            os.kill(units(backend)[0], signal.SIGCONT)
        await put(backend, ["c"], wide(3))
        assert [1.0, 3.0] == (await get(backend, ["a", "c"]))[:, 0].tolist()


@in_loop
async def test_a_unit_is_added_while_others_put(opened: Any, tmp_path: Path) -> None:
    """Nothing moves and nothing is lost; columns join their rows; the new unit takes its share of new rows."""
    old, new = [f"old-{number}" for number in range(16)], [f"new-{number}" for number in range(16)]
    async with opened(units=2, shared_from_bytes=None) as backend:
        joined = ZMQBackend(QueueConfig(join=str(tmp_path / "queue" / "units.json")), TransferQueueContext())
        await joined.start()
        await put(backend, old, dense_column(torch.arange(16.0)))
        during = asyncio.gather(*(put(joined, [key], dense_column(torch.ones(1)), "y") for key in old + new))
        assert 2 == await backend.add_unit()
        await during
        for each in (backend, joined):  # the other hears of it by itself
            await put(each, old + new, dense_column(torch.arange(32.0)), "z")
            found = await each.get(GetRequest(partition="p", keys=tuple(old), columns=("x", "y", "z")))
            assert list(map(float, range(16))) == found.columns["x"].values.tolist()
            assert [1.0] * 16 == found.columns["y"].values.tolist()
            assert list(map(float, range(32))) == (await get(each, old + new, "z")).tolist()
        assert 32 == (await backend.stats()).samples
        later = [f"later-{number}" for number in range(30)]
        await put(joined, later, dense_column(torch.arange(30.0)))
        assert 3 == len({home(joined, key) for key in later})
        assert 62 == await delete(joined, old + new + later)
        assert (0, 0) == ((stats := await backend.stats()).samples, stats.bytes)
        with pytest.raises(QueueError) as caught:
            await joined.add_unit()
        assert "queue.invalid" == caught.value.code
        await joined.close()


@in_loop
async def test_hosts_that_share_no_memory_read_each_other(opened: Any, tmp_path: Path) -> None:
    """Over encrypted TCP: whoever shares no memory gets and gives raw frames."""
    async with opened(encrypted=True) as backend:
        far = ZMQBackend(
            QueueConfig(join=str(tmp_path / "queue" / "units.json"), shared_from_bytes=None), TransferQueueContext()
        )
        await far.start()
        await put(backend, ["near", "nearer"], wide(1, 2))
        await put(far, ["far"], wide(3))
        for each in (backend, far):
            found = await get(each, ["far", "near", "nearer"])
            assert [[3.0] * WIDE, [1.0] * WIDE, [2.0] * WIDE] == found.tolist()
        await far.close()


@in_loop
async def test_large_columns_are_shown_where_they_lie_and_stay(opened: Any, tmp_path: Path) -> None:
    """Without a copy; also after the rows were deleted, others were put, and the backend was closed."""
    async with opened() as backend:
        await put(backend, ["a", "b"], wide(1, 2))
        first, second = await get(backend, ["a", "b"]), await get(backend, ["a", "b"])
        assert first.data_ptr() == second.data_ptr()
        part = second[1:]
        del second
        assert 2 == await delete(backend, ["a", "b"])
        await put(backend, ["c", "d"], wide(3, 4))
        await delete(backend, ["c", "d"])
        turned = await get_after_put(backend)
    assert [[1.0] * WIDE, [2.0] * WIDE] == first.tolist()
    assert [[2.0] * WIDE] == part.tolist()
    assert [6.0, 5.0] == turned[:, 9].tolist()


async def get_after_put(backend: ZMQBackend) -> torch.Tensor:
    """Rows in another order than they were put in: copied together."""
    await put(backend, ["e", "f"], wide(5, 6))
    return await get(backend, ["f", "e"])


@in_loop
async def test_shared_memory_that_stays_full_is_refused_and_used_again(opened: Any) -> None:
    async with opened(shared_max_bytes=2 * WIDE * 4 + 1024, seconds=0.3) as backend:
        for number in range(20):  # ten times as much as there is
            await put(backend, ["a", "b"], wide(number, number))
            assert 2 == await delete(backend, ["a", "b"])
        await put(backend, ["a", "b"], wide(1, 2))
        with pytest.raises(QueueError) as caught:
            await put(backend, ["c"], wide(3))
        assert "queue.full" == caught.value.code
        assert "shared_max_bytes" in str(caught.value.where)
        await put(backend, ["a"], dense_column(torch.ones(1)))  # half of it goes, which does not help
        with pytest.raises(QueueError) as caught:
            await put(backend, ["c"], wide(3))
        assert "queue.full" == caught.value.code
        await delete(backend, ["b"])
        await put(backend, ["c"], wide(3))
        assert [3.0] == (await get(backend, ["c"]))[:, 0].tolist()


@in_loop
async def test_a_large_put_is_copied_in_pieces_and_gives_its_memory_back_when_it_is_broken_off(opened: Any) -> None:
    large = torch.arange(3.5 * 2**20).reshape(2, -1)  # no multiple of a piece
    size = large.numel() * 4
    async with opened(shared_max_bytes=size + 4096, seconds=0.3) as backend:
        for _ in range(3):  # there would be room for one
            broken = asyncio.ensure_future(put(backend, ["a", "b"], dense_column(large)))
            await asyncio.sleep(0)
            broken.cancel()
            with pytest.raises(asyncio.CancelledError):
                await broken
        await put(backend, ["a", "b"], dense_column(large))
        assert torch.equal(large, await get(backend, ["a", "b"]))


@in_loop
async def test_a_checkpoint_is_one_moment_of_all_units_and_goes_on_elsewhere(opened: Any, tmp_path: Path) -> None:
    """Whoever puts b after a: no checkpoint has b without a. Two at once wait for each other."""
    folders = [SnapshotRequest(folder=str(tmp_path / name)) for name in ("one", "two")]
    async with opened(units=2) as backend:
        await put(backend, ["large"], wide(9))

        begun = asyncio.Event()

        async def produce() -> None:
            for number in range(40):
                await put(backend, [f"{number}"], dense_column(torch.tensor([float(number)])))
                if number == 3:
                    begun.set()

        producing = asyncio.ensure_future(produce())
        await begun.wait()
        await asyncio.gather(*map(backend.checkpoint, folders))
        await producing
        for folder in folders:
            memory = MemoryBackend(MemoryConfig(), TransferQueueContext())
            rows = (await memory.restore(folder)).samples - 1
            found = await memory.get(GetRequest(partition="p", keys=tuple(map(str, range(rows))), columns=("x",)))
            assert list(map(float, range(rows))) == found.columns["x"].values.tolist()
            assert rows + 1 == (await backend.restore(folder)).samples
            assert [9.0] == (await get(backend, ["large"]))[:, -1].tolist()


@pytest.fixture
def owner(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has started two units, and says which."""
    script = (
        "import asyncio, sys\n"
        "from jackfield.abc.transfer_queue import TransferQueueContext\n"
        "from jackfield_transport_zmq.backend import ZMQBackend\n"
        "from jackfield_transport_zmq.config import QueueConfig\n"
        "async def main():\n"
        "    backend = ZMQBackend(QueueConfig(units=2), TransferQueueContext())\n"
        "    await backend.start()\n"
        "    print(*(child.process.pid for child in backend._children), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.communicate()


def test_units_end_with_the_process_that_started_them(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    processes = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
    try:
        assert ([], [], []) == select.select(processes, [], [], 0)
        owner.kill()
        for process in processes:
            assert [process] == select.select([process], [], [], 20.0)[0]
    finally:
        for process in processes:
            os.close(process)


@in_loop
async def test_a_queue_that_is_not_there_cannot_be_joined(opened: Any, tmp_path: Path) -> None:
    file = tmp_path / "units.json"
    for content, code in ((None, "queue.unreachable"), ("{", "queue.store"), ('{"format": 9}', "queue.store")):
        if content is not None:
            file.write_text(content)
        with refused(("queue.store", "queue.unreachable"), "units.json") as caught:
            async with opened(join=str(file)):
                pass
        assert code == caught.value.code
    with pytest.raises(QueueError) as caught:
        async with opened(host="192.0.2.1"):
            pass
    assert "queue.store" == caught.value.code


@pytest.mark.timeout(180)
def test_workers_read_each_other_while_the_controllers_process_stands_still(tmp_path: Path) -> None:
    check_values_go_straight(ZMQBackend, QueueConfig(units=2), tmp_path / "queue")
