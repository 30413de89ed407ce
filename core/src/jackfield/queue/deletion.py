"""Deleting values that no consumer needs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import attrs

from jackfield.abc.transfer_queue import DeleteRequest, TransferQueueBackend
from jackfield.errors import QueueError
from jackfield.queue.listing import orphans
from jackfield.queue.state import State


@attrs.define(eq=False)
class Deletion:
    """Deletes values in the background; a checkpoint holds it back."""

    backend: TransferQueueBackend
    state: State
    write: Callable[[], None]  #: brings what has changed to the store
    lock: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _task: asyncio.Task[None] | None = attrs.field(default=None, init=False)
    _failure: Exception | None = attrs.field(default=None, init=False)

    def start(self) -> None:
        """Begin to delete."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Stop deleting in the background."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def require_well(self) -> None:
        """
        Raises:
            QueueError: the backend could not delete.
        """
        if self._failure is not None:
            raise QueueError(f"the backend failed to delete samples: {self._failure}") from self._failure

    async def _run(self) -> None:
        while True:
            if not self.state.discarded:
                await self.state.discards.next()
            try:
                async with self.lock:
                    await self.forget()
            except Exception as error:
                self._failure = error  # raised by the next call; only room is lost
                return

    async def forget(self) -> None:
        """Delete what no consumer needs; the caller holds the lock."""
        self.write()  # that it is not needed
        discarded, self.state.discarded = self.state.discarded, {}
        for partition, keys in discarded.items():
            await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))

    async def sweep(self) -> None:
        """Delete what no consumer needs, and what workers left that died before they reported it."""
        async with self.lock:
            await self.forget()
            for partition, keys in (await orphans(self.backend, self.state)).items():
                self.state.discard(partition, keys)
            await self.forget()
