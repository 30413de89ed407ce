"""What the controller of a queue costs per row, over a backend that keeps nothing: a part of ``transfer_queue.py``."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any


async def controller(rows: int) -> dict[str, Any]:
    """Microseconds and bytes per row: groups of 8 rows, batches of 32 groups, tags as the trainer writes them."""
    import torch

    from jackfield.abc.transfer_queue import Column, DeleteResult, PutResult, TransferQueueContext
    from jackfield.clock import Clock
    from jackfield.queue import TransferQueue, Values
    from jackfield.queue.meta import GroupKey, NewGroup, RolloutReport
    from jackfield.queue.values import MemoryBackend, MemoryConfig

    class Nothing(MemoryBackend):
        """A backend that stores no values."""

        async def put(self, request: Any) -> PutResult:
            return PutResult(bytes=0)

        async def delete(self, request: Any) -> DeleteResult:
            return DeleteResult(samples=0, bytes=0)

    backend = Nothing(MemoryConfig(), TransferQueueContext())
    queue, values = TransferQueue(backend, Clock()), Values(backend)
    await queue.start()
    await queue.register_consumer("trainer", partition="train", columns=("ids",))
    columns = {"ids": Column(values=torch.zeros(1, 8))}

    async def rollout(values: Values, key: GroupKey, number: int, columns: dict[str, Column]) -> RolloutReport:
        tags = {"prompt_tokens": 100, "response_tokens": 200 + number}
        name = key.sample(number, 0)
        written = await values.put("train", [name], columns, [tags])
        return RolloutReport(group=str(key), rollout=number, keys=(name,), written=written)

    batches, before = max(1, rows // 256), resident_bytes()
    began = time.process_time()
    for number in range(batches):
        batch = await queue.claim_batch("train", "e", 32, rollouts=8)
        assert batch is not None
        groups = queue.groups_to_fill(batch, 1.0)
        keys = await anext(groups)
        await queue.open_groups([NewGroup(key=key, task_id=f"task-{number}", rollouts=8) for key in keys])
        for key in keys:
            await queue.end_rollouts([await rollout(values, key, number, columns) for number in range(8)])
        await groups.aclose()  # type: ignore[attr-defined]
    put, grown = time.process_time() - began, resident_bytes() - before
    began = time.process_time()
    for number in range(batches):
        leased = await queue.lease("trainer", batch=number, deadline_seconds=1.0)
        await queue.ack(leased, step=number)
        await queue.commit(number)
    consume = time.process_time() - began
    await queue.close()
    count = batches * 256
    return {
        "rows": count,  # whole batches, so perhaps fewer or more than were asked for
        "put_us": put / count * 1e6,
        "consume_us": consume / count * 1e6,
        "bytes_per_row": grown / count,
    }


def plot(costs: list[dict[str, Any]], file: str) -> None:
    """Draw what a row costs over the number of rows; lines that stay flat are what is aimed at."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = [one["rows"] for one in costs]
    figure, (time_axes, memory_axes) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name, label in (("put_us", "put"), ("consume_us", "lease, ack and commit")):
        time_axes.plot(rows, [one[name] for one in costs], marker="o", label=label)
    time_axes.set_ylabel("processor time per row, µs")
    time_axes.legend()
    memory_axes.plot(rows, [one["bytes_per_row"] for one in costs], marker="o", color="C2")
    memory_axes.axhline(1000, color="grey", linestyle="--", label="1 GB for a million rows")
    memory_axes.set_ylabel("memory per row, bytes")
    memory_axes.legend()
    for axes in (time_axes, memory_axes):
        axes.set_xscale("log")
        axes.set_xlabel("rows in the queue")
        axes.set_ylim(bottom=0)
    figure.savefig(file, dpi=130)


def resident_bytes() -> int:
    """Memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
