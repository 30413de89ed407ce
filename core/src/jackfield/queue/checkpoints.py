"""Checkpoints of the queue: writing one, and going on from one."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.transfer_queue import SnapshotRequest, TransferQueueBackend
from jackfield.errors import QueueError
from jackfield.queue.deletion import Deletion
from jackfield.queue.leases import Leases
from jackfield.queue.listing import lost_samples, orphans
from jackfield.queue.missing import some
from jackfield.queue.restoring import Checkpoint, adopt, go_back, newest
from jackfield.queue.state import State
from jackfield.queue.store import STORE_FILE, Store, save

VALUES_FOLDER = "values"
_MARKS = 8  #: of checkpoints that a state remembers


@attrs.define(eq=False)
class Checkpoints:
    """Writes checkpoints of state and values, and puts the queue back to one."""

    backend: TransferQueueBackend
    state: State
    store: Store
    leases: Leases
    deletion: Deletion
    fail_lost: Callable[..., Coroutine[Any, Any, tuple[str, ...]]]
    begin_again: Callable[[], None]  #: offers what there is, once the state is another one

    async def save(self, folder: Path, again_from: Mapping[str, int]) -> None:
        """See :meth:`TransferQueue.checkpoint`."""
        folder.mkdir(parents=True, exist_ok=True)
        async with self.deletion.lock:
            saved = await self._cut(folder, {} if self.store.durable else again_from)
        save(folder / STORE_FILE, saved.rows, saved.lineage)
        self.store.sync()
        await self.deletion.sweep()

    async def _cut(self, folder: Path, again_from: Mapping[str, int]) -> Checkpoint:
        """Write values, and note the state of the moment at which they are cut; without lost samples."""
        while True:
            await self.fail_lost()
            mark = uuid.uuid4().hex
            self.state.marks = [*self.state.marks[1 - _MARKS :], mark]
            self.store.write(self.state)
            saved = Checkpoint.of(self.state, self.store, mark, again_from)
            try:
                await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
                return saved
            except QueueError as error:
                named = [str(key) for key in error.found] if isinstance(error.found, list | tuple) else []
                if error.code != "queue.lost" or len(await self.fail_lost(keys=named)) < len(named):
                    raise  # a consumer works with them
                await self.deletion.forget()  # the rest makes the next attempt

    async def restore(self, folder: Path, step: int | None) -> bool:
        """See :meth:`TransferQueue.restore`."""
        saved = Checkpoint.read(folder / STORE_FILE)
        if saved.ledger is not None and self.store.end is not None:
            self.store.verify(saved.ledger)
        async with self.deletion.lock:
            kept = await self._go_on(saved, step)
            if not kept:
                await self.backend.restore(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
                self._adopt(saved.state(self.state.clock))
                self.state.marks = [saved.mark]
            go_back(self.state, self.store, saved, step if kept else None)
            if step is not None:
                self.leases.take_back(step)
                self.leases.commit(step)
            self.state.derived.update(saved.lineage)
            self.store.begin(self.state)
        await self.fail_lost()
        await self.deletion.sweep()
        return kept

    async def _go_on(self, saved: Checkpoint, step: int | None) -> bool:
        """Take what came after a checkpoint, where that can be done."""
        clock = self.state.clock
        state = None if step is None else newest(self.state, self.store, saved, step)
        if state is None:
            return False
        lost = await lost_samples(self.backend, state) & saved.keys(clock)
        if lost:
            _warn_of_lost(state, saved.keys(clock), lost)
            return False
        if state is self.state:  # the trainer died, and this process lives
            self.leases.end(lambda consumer, epoch: True)
            samplers = saved.state(clock).consumers
            for consumer in [each for name, each in self.state.consumers.items() if name in samplers]:
                consumer.sampler.load_state_dict(samplers[consumer.name].saved_sampler)
        else:
            self._adopt(state)
            self.state.marks = state.marks
        return True

    def _adopt(self, state: State) -> None:
        adopt(self.state, state)
        self.begin_again()

    async def clear(self) -> None:
        """See :meth:`TransferQueue.clear`."""
        self.store.clear()
        async with self.deletion.lock:
            before = self.state.samples, any(each.next_batch for each in self.state.partitions.values())
            self._adopt(State(self.state.clock))
            self.state.marks = []
            found = await orphans(self.backend, self.state)
            for partition, keys in found.items():
                self.state.discard(partition, keys)
            await self.deletion.forget()
            if found or any(before):
                self.state.record("clear", samples=sum(map(len, found.values())))
            self.store.begin(self.state)


def _warn_of_lost(state: State, known: set[str], lost: set[str]) -> None:
    """Name the lost samples, and what was made since: the queue goes back to a checkpoint."""
    groups = sorted(str(group.key) for group in state.groups.values() if not known >= group.samples.keys())
    logging.getLogger("jackfield").warning(
        "%d samples are gone from the queue's store (%s): the queue goes on with the samples of its checkpoint, and "
        "what was made since is made again: %s",
        *(len(lost), some(sorted(lost)), f"groups {some(groups)}" if groups else "nothing"),
    )
