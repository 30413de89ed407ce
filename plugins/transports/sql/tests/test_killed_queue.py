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

from jackfield.abc.transfer_queue import TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.queue import TransferQueue
from jackfield.queue.meta import Lineage
from jackfield.queue.store import trace
from jackfield.sdk.cells import column_from_rows, dense_column
from jackfield_queue_bench import Bench
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config

MOMENTS = ("rewards written", "rewards announced")
DERIVED = "derived"


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each moment, which a process that was killed then has left."""
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, __file__, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=environment)
    assert 0 == done.returncode, done.stderr
    return folder


async def opened(folder: Path) -> Bench:
    backend = SQLBackend(Config(), TransferQueueContext(folder=str(folder / "queue")))
    queue = TransferQueue(backend, Clock())
    await queue.start()
    bench = Bench(queue, Clock())  # type: ignore[arg-type]
    await bench.trainer("ids", "reward")
    return bench


def columns_of(length: int) -> dict[str, Any]:
    return {"ids": column_from_rows([torch.arange(length)])}


async def live_and_be_killed(folder: Path, moment: str) -> None:
    """Two samples, one of them with its reward, and a checkpoint; then the other's reward comes, or not in time."""
    bench = await opened(folder)
    keys: list[str] = []
    for key in await bench.vacant(await bench.claim(2)):
        keys += await bench.report(await bench.open(key, 1), 0, columns_of(key.index + 1))
    await bench.reward(keys[:1])
    await bench.queue.checkpoint(folder / "checkpoint")
    written = await bench.values.put("train", keys[1:], {"reward": dense_column(torch.ones(1))})
    if moment == "rewards announced":
        await bench.queue.add_columns(keys[1:], written)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_sample_is_ready_when_its_reward_is_there_and_not_before(killed: Path, moment: str) -> None:
    """Whatever came after the checkpoint is made again: a reward that the queue does not know is not believed."""
    folder = killed / moment

    async def main() -> None:
        bench = await opened(folder)
        try:
            await bench.queue.restore(folder / "checkpoint")
            first = await bench.queue.lease("trainer", deadline_seconds=0)
            assert ("train/0/0/0/0/0",) == first.keys
            with pytest.raises(DeadlineExceeded) as late:
                await bench.queue.lease("trainer", deadline_seconds=0)
            assert "1 samples lack columns: train/0/1/0/0/0 (reward)" in late.value.message
            waiting = asyncio.ensure_future(bench.queue.lease("trainer", deadline_seconds=60))
            await asyncio.sleep(0)
            assert not waiting.done()
            await bench.reward(["train/0/1/0/0/0"])
            second = await waiting
            found: Any = await bench.values.read(second, ("ids", "reward"))
            assert ([0, 1], [1.0]) == (found["ids"].values.tolist(), found["reward"].values.tolist())
            found = await bench.values.read(first, ("reward",))
            assert [1.0] == found["reward"].values.tolist()
        finally:
            await bench.queue.close()

    asyncio.run(main())


async def derive_and_be_killed(folder: Path) -> None:
    """Make a sample of one that is consumed before the checkpoint."""
    bench = await opened(folder)
    keys: list[str] = []
    for number in range(2):
        (key,) = await bench.vacant(await bench.claim())
        columns = {"ids": column_from_rows([torch.arange(2)]), "reward": dense_column(torch.ones(1))}
        made = Lineage("repair", tuple(keys)) if keys else None
        keys += await bench.report(await bench.open(key, 1), 0, columns, made=made, length=2)
        if not number:
            await bench.queue.ack(await bench.queue.lease("trainer", deadline_seconds=0))
    await bench.queue.checkpoint(folder / "checkpoint")
    os.kill(os.getpid(), signal.SIGKILL)


def test_what_a_row_was_made_of_survives_in_database_and_checkpoint(killed: Path) -> None:
    folder = killed / DERIVED
    with closing(sqlite3.connect(folder / "queue" / "samples.sqlite")) as database:
        query = "select tags from jackfield_samples where key = 'train/1/0/0/0/0'"
        ((tags,),) = database.execute(query).fetchall()
    assert {"length": 2, "operation": "repair", "parents": ["train/0/0/0/0/0"]} == json.loads(tags)

    async def main() -> None:
        bench = await opened(folder)
        try:
            await bench.queue.restore(folder / "checkpoint")
            await bench.queue.checkpoint(folder / "again")
        finally:
            await bench.queue.close()

    asyncio.run(main())
    root = trace("train/1/0/0/0/0", folder / "again", None)
    made = root["operation"], root["in_queue"], [each["key"] for each in root["parents"]]
    assert ("repair", True, ["train/0/0/0/0/0"]) == made


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
