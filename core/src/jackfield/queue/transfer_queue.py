"""The TransferQueue: what producers and consumers talk to."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Mapping
from pathlib import Path

from jackfield.abc.transfer_queue import DeleteRequest, KeysRequest, SnapshotRequest
from jackfield.errors import QueueError
from jackfield.queue.batches import Batches
from jackfield.queue.controller import mutates, some
from jackfield.queue.meta import group_of
from jackfield.queue.records import State
from jackfield.queue.saving import Row, Saved, every_row
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER, read_checkpoint, uses

_MARKS = 8  #: of checkpoints that a state remembers


class TransferQueue(Batches):
    """Samples × columns in groups and batches, leased and acked exactly once.

    It holds metadata only: values go straight to a backend (:class:`~jackfield.queue.values.Values`). The text of
    :mod:`jackfield.queue` says what groups, consumers and backpressure are. All methods are called on one event loop.
    """

    async def start(self) -> None:
        """Start the backend, and the deletion of what nothing needs."""
        await self.backend.start()
        self._is_closed = False
        self._deletion = asyncio.create_task(self._delete())

    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close store and backend. Idempotent."""
        self._is_closed = True
        self._wake()
        deletion, self._deletion = self._deletion, None
        if deletion is not None:
            deletion.cancel()
            await asyncio.gather(deletion, return_exceptions=True)
        self._store.close()
        await self.backend.close()

    # -- deletion

    async def _delete(self) -> None:
        """Delete values in the background. After a failure, which the next call raises, only room is lost."""
        while True:
            while not self._discarded:
                await self._change.wait()
            async with self._deleting:
                await self._forget_discarded()

    async def _forget_discarded(self) -> None:
        """Delete what no consumer needs; the caller holds the lock."""
        self._store.write(self._state)  # that it is not needed
        discarded, self._discarded = self._discarded, {}
        for partition, keys in discarded.items():
            await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))

    async def _discard_orphans(self) -> int:
        """Delete what the backend has and the queue does not know, of workers that died; return the number of samples.

        The caller holds the lock.
        """
        found = 0
        for partition, key in (await self.backend.keys(KeysRequest())).samples:
            group = self._state.groups.get(group_of(key))
            if not self._state.knows(key) and (group is None or group.is_published):
                self._discard([key], partition)
                found += 1
        await self._forget_discarded()
        return found

    async def flush(self) -> None:
        """Return when the backend holds the samples of the queue and no others."""
        self._require_open()
        async with self._deleting:
            await self._discard_orphans()

    # -- checkpoints

    @mutates
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write state and values, as they are at one moment. Producers go on; deletions wait.

        ``again_from`` names by partition the first batch that is saved as if nothing of it had been made. A durable
        queue keeps what there is.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        async with self._deleting:
            rows, keys = await self._cut(folder, {} if self._store.durable else again_from or {})
        self._store.save(folder / STORE_FILE, rows, keys)
        self._store.sync()
        await self.flush()

    async def _cut(self, folder: Path, again_from: Mapping[str, int]) -> tuple[list[Row], list[str]]:
        """Write values, and return the state of the moment at which they are cut; without lost samples."""
        while True:
            await self.fail_lost()
            mark = uuid.uuid4().hex
            self._state.marks = [*self._state.marks[1 - _MARKS :], mark]
            self._store.write(self._state)
            rows = every_row(self._state, again_from, mark=mark, ledger=self._store.end)
            keys = list(self._state.keys())
            try:
                await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
                return rows, keys
            except QueueError as error:
                named = [str(key) for key in error.found] if isinstance(error.found, list | tuple) else []
                if error.code != "queue.lost" or len(await self.fail_lost(keys=named)) < len(named):
                    raise  # a consumer works with them
                await self._forget_discarded()  # the rest makes the next attempt

    @mutates
    async def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Go on from a checkpoint, or from what came after it where that was kept; the ledger says which acks are void.

        What came after it is kept where the queue lived on, or where state and backend are durable and nothing of the
        checkpoint's samples is lost. Then everything is as the last call left it, but leases have ended, open groups
        are made again, and acks of steps after ``step`` do not count. ``step`` is the last one of the checkpoint, whose
        acks are final; with None only the checkpoint counts, as it is. Samplers are those of the checkpoint.

        Return whether what came after the checkpoint was kept.

        Raises:
            QueueError: ``queue.invalid`` for a damaged checkpoint; ``queue.ledger`` where the ledger is not the one
                that it knows.
        """
        saved = read_checkpoint(Path(folder) / STORE_FILE)
        if saved.head.ledger is not None and self._store.end is not None:
            self._store.verify(saved.head.ledger)
        async with self._deleting:
            newer = None if step is None else await self._newer(saved, step)
            if newer is None:
                await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            self._adopt(newer or saved.state(), saved)
            self._void_acks(saved, step if newer else None)
            if step is not None:
                self._take_back(step)
                self._commit(step)
            self._store.derived.update(saved.lineage)
            self._store.begin(every_row(self._state))
        await self.fail_lost()
        await self.flush()
        return newer is not None

    async def _newer(self, saved: Saved, step: int) -> State | None:
        """Find a state that came after a checkpoint, can go back to ``step``, and has all samples of the checkpoint."""
        state = self._state if saved.head.mark in self._state.marks else self._stored(saved)
        if state is None or state.committed > step:
            return None
        known = saved.state().keys()
        lost = await self._lost(state) & known
        if not lost:
            return state
        groups = sorted(group.name for group in state.groups.values() if not known >= group.samples.keys())
        logging.getLogger("jackfield").warning(
            "%d samples are gone from the queue's store (%s): the queue goes on with the samples of its checkpoint, "
            "and what was made since is made again: %s",
            *(len(lost), some(sorted(lost)), f"groups {some(groups)}" if groups else "nothing"),
        )
        return None

    def _stored(self, saved: Saved) -> State | None:
        """Read the state of a process that is gone, where it came after a checkpoint."""
        try:
            found = self._store.saved() if self._store.durable else None
            # without the mark another run, or the same one without a durable queue, was here meanwhile
            return found.state() if found is not None and saved.head.mark in found.head.marks else None
        except QueueError as error:
            if error.code != "queue.invalid":
                raise
            message = "the queue's saved state is damaged (%s): what was made since the checkpoint is made again"
            logging.getLogger("jackfield").warning(message, error)
            return None

    def _adopt(self, state: State, saved: Saved | None) -> None:
        """Go on with a state, with the consumers that are registered, and samplers as they were saved."""
        if state is self._state:  # a trainer died, and this process lives
            self._end_leases(lambda consumer, hold: True)
        else:
            self._replace(state)
        for name, (*_, sampler) in ({} if saved is None else saved.head.consumers).items():
            if sampler and name in state.consumers:
                state.consumers[name].sampler.load_state_dict(sampler)

    def _replace(self, state: State) -> None:
        """Replace everything but what consumers are registered for. Waiters look again."""
        for consumer in self._state.consumers.values():
            if (before := state.consumers.get(consumer.name)) is not None:
                consumer.epoch = max(consumer.epoch, before.epoch)
            consumer.ready, consumer.used, consumer.held = {}, {}, {}
            state.add_consumer(consumer)
        self._state = state
        self._discarded.clear()
        self._offer_again()
        for batch in state.batches():
            if batch.failure is None and (vacant := [place.index for place in batch.vacant()]):
                where = {"partition": batch.partition.name, "batch": batch.number}
                self._record("release", **where, groups=vacant, reason="the queue was restored")
        clients, self._clients = frozenset(self._clients.values()), {}
        self.on_reset("has made the queue another one; what was begun before is in vain", clients)

    def _void_acks(self, saved: Saved, step: int | None) -> None:
        """Say in the ledger which acks after a checkpoint do not count; with a step those of later ones alone."""
        if saved.head.ledger is None or self._store.end is None:
            return
        for consumer, keys in uses(self._store.entries(saved.head.ledger.number)).items():
            void = [
                key
                for key, steps in keys.items()
                for each in steps
                if step is None or (each is not None and each > step)
            ]
            if void:
                self._record("rollback", consumer=consumer, step=step, keys=void)

    @mutates
    async def clear(self) -> None:
        """Forget everything, the ledger included; of a durable backend also what it kept of an earlier run."""
        self._store.clear()
        async with self._deleting:
            before = self._state.samples or any(each.next_batch for each in self._state.partitions.values())
            self._replace(State())
            found = await self._discard_orphans()
            if found or before:
                self._record("clear", samples=found)
            self._store.begin(every_row(self._state))
