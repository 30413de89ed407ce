"""A process of the tests: joins the queue of its first argument, keeps one of its own in its second, and waits."""

from __future__ import annotations

import asyncio
import sys

import torch

from jackfield.abc.transfer_queue import GetRequest, PutRequest, TransferQueueContext
from jackfield.sdk.cells import dense_column
from jackfield_transport_nixl.backend import NIXLBackend
from jackfield_transport_nixl.config import QueueConfig


async def main(theirs: str, folder: str) -> None:
    joined = NIXLBackend(QueueConfig(join=theirs), TransferQueueContext())
    own = NIXLBackend(QueueConfig(), TransferQueueContext(folder=folder))
    await joined.start()
    await own.start()
    found = await joined.get(GetRequest(partition="p", keys=("a", "b"), columns=("x",)))
    column = dense_column(found.columns["x"].values + 1)
    for backend in (joined, own):
        await backend.put(PutRequest(partition="p", keys=("c", "d"), columns={"x": column}))
    client = joined._client
    assert client is not None
    await client.room(3 << 20)  # and dies before it has written there
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(main(*sys.argv[1:]))
