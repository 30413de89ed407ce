"""What a queue on a database still knows when its process is killed: which rewards are there, and lineage."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import GetRequest, TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.queue import Lineage, LocalQueue, TransferQueue, column_from_rows, dense_column
from jackfield.queue.browse import trace
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config

MOMENTS = ("rewards written", "rewards announced")
DERIVED = "derived"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each moment, which a process that was killed then has left."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, __file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert 0 == done.returncode, done.stderr
    return folder


async def opened(folder: Path) -> TransferQueue:
    backend = SQLBackend(Config(), TransferQueueContext(folder=str(folder / "queue")))
    queue = LocalQueue(backend, Clock())
    await queue.start()
    await queue.register_consumer("trainer", "train", ("ids", "reward"))
    return queue


async def live_and_be_killed(folder: Path, moment: str) -> None:
    """Two rows, one of them with its reward, and a checkpoint; then the other's reward comes, or not in time."""
    queue = await opened(folder)
    ticket = await queue.claim_ticket("train", "explorer", 2)
    keys: list[str] = []
    async for slot in queue.slots(ticket, 0.0, until="published"):
        group = await queue.open_group(slot, "task", runs=1)
        keys += await queue.put_run(group, 0, {"ids": column_from_rows([torch.arange(slot.index + 1)])})
    reward = {"reward": dense_column(torch.ones(1))}
    await queue.put(keys[:1], reward)
    await queue.checkpoint(folder / "checkpoint")
    if moment == "rewards announced":
        await queue.put(keys[1:], reward)
    elif moment == "rewards written":
        queue._controller.end_columns = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign,assignment]
        await queue.put(keys[1:], reward)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_row_is_ready_when_its_reward_is_there_and_not_before(killed: Path, moment: str) -> None:
    """Whatever came after the checkpoint is made again: a reward that nobody remembers is not believed."""
    folder = killed / moment

    async def main() -> None:
        queue = await opened(folder)
        try:
            await queue.restore(folder / "checkpoint")
            first = await queue.lease("trainer", deadline_seconds=0)
            assert ("train/0/0/0/0/0",) == first.keys
            missing = r"1 rows lack columns: train/0/1/0/0/0 \(reward\); 1 rows are leased"
            with pytest.raises(DeadlineExceeded, match=missing):
                await queue.lease("trainer", deadline_seconds=0)
            waiting = asyncio.ensure_future(queue.lease("trainer", deadline_seconds=60))
            await asyncio.sleep(0)
            assert not waiting.done()
            await queue.put(["train/0/1/0/0/0"], {"reward": dense_column(torch.tensor([0.5]))})
            second = await waiting
            found: Any = await queue.get(second, ("ids", "reward"))
            assert ([0, 1], [0.5]) == (found["ids"].values.tolist(), found["reward"].values.tolist())
            request = GetRequest(partition="train", keys=first.keys, columns=("reward",))
            assert [1.0] == (await queue.backend.get(request)).columns["reward"].values.tolist()
        finally:
            await queue.close()

    asyncio.run(main())


async def derive_and_be_killed(folder: Path) -> None:
    """A row that was repaired, from one that is consumed before the checkpoint."""
    queue = await opened(folder)
    first, second = await queue.claim_ticket("train", "explorer", 1), await queue.claim_ticket("train", "explorer", 1)
    keys: list[str] = []
    for ticket in (first, second):
        async for slot in queue.slots(ticket, 0.0, until="published"):
            group = await queue.open_group(slot, "task", runs=1)
            columns = {"ids": column_from_rows([torch.arange(2)]), "reward": dense_column(torch.ones(1))}
            lineage = [Lineage("repair", tuple(keys))] if keys else None
            keys += await queue.put_run(group, 0, columns, [{"length": 2}], lineage=lineage)
            if len(keys) == 1:
                await queue.ack(await queue.lease("trainer", deadline_seconds=0))
    await queue.checkpoint(folder / "checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_row_was_made_of_survives_in_database_and_checkpoint(killed: Path) -> None:
    folder = killed / DERIVED
    with closing(sqlite3.connect(folder / "queue" / "samples.sqlite")) as database:
        query = "select tags from jackfield_samples where key = 'train/1/0/0/0/0'"
        ((tags,),) = database.execute(query).fetchall()
    assert {"length": 2, "operation": "repair", "parents": ["train/0/0/0/0/0"]} == json.loads(tags)

    async def main() -> None:
        queue = await opened(folder)
        try:
            await queue.restore(folder / "checkpoint")
            await queue.checkpoint(folder / "again")
        finally:
            await queue.close()

    asyncio.run(main())
    root = trace("train/1/0/0/0/0", folder / "again", None)
    assert ("repair", True, ["train/0/0/0/0/0"]) == (root.operation, root.in_queue, [each.key for each in root.parents])


def kill(moment: str, folder: Path) -> None:
    """Live in a child of this process, which imports everything once, and be killed there."""
    child = os.fork()
    if child == 0:
        asyncio.run(derive_and_be_killed(folder) if moment == DERIVED else live_and_be_killed(folder, moment))
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


if __name__ == "__main__":
    for name in (*MOMENTS, DERIVED):
        kill(name, Path(sys.argv[1]) / name)
