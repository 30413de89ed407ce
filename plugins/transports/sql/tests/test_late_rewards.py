"""A row without its reward stays invisible to the trainer, also when everything is killed in between."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.abc.transfer_queue import GetRequest, TransferQueueContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.queue import TransferQueue, column_from_rows, dense_column
from jackfield_transport_sql.backend import SQLBackend
from jackfield_transport_sql.config import Config

MOMENTS = ("rewards late", "rewards written", "rewards announced")


async def opened(folder: Path) -> TransferQueue:
    backend = SQLBackend(Config(), TransferQueueContext(folder=str(folder / "queue")))
    queue = TransferQueue(backend, Clock())
    await queue.start()
    queue.register_consumer("trainer", "train", ("ids", "reward"))
    return queue


async def live_and_be_killed(folder: Path, moment: str) -> None:
    """Two rows, one of them with its reward, and a checkpoint; then the other's reward comes, or not in time."""
    queue = await opened(folder)
    ticket = queue.claim_ticket("train", "explorer", 2)
    keys: list[str] = []
    async for slot in queue.slots(ticket, 0.0, until="published"):
        group = queue.open_group(slot, "task", runs=1)
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
def test_a_row_is_ready_when_its_reward_is_there_and_not_before(tmp_path: Path, moment: str) -> None:
    """Whatever came after the checkpoint is made again: a reward that nobody remembers is not believed."""
    command = [sys.executable, __file__, str(tmp_path), moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert -signal.SIGKILL == done.returncode, done.stderr

    async def main() -> None:
        queue = await opened(tmp_path)
        try:
            await queue.restore(tmp_path / "checkpoint")
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


if __name__ == "__main__":
    asyncio.run(live_and_be_killed(Path(sys.argv[1]), sys.argv[2]))
