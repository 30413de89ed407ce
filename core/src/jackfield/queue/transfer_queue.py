"""The TransferQueue: what producers and consumers talk to.

Here, client and controller live in one process; values go to a backend and never through the controller.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.abc.transfer_queue import SnapshotRequest
from jackfield.errors import QueueError
from jackfield.queue.archive import write_archive
from jackfield.queue.consuming import Consuming
from jackfield.queue.journal import read_journal
from jackfield.queue.producing import Producing
from jackfield.queue.snapshot import FORMAT, load_state, state_dict

__all__ = ["STATE_FILE", "VALUES_FOLDER", "TransferQueue"]

_EPOCHS = 0xFFFFFFFF  #: that one process gives at most
_MARKS = 8  #: of checkpoints, also of those that were broken off, that a journal remembers

STATE_FILE = "controller.json"
VALUES_FOLDER = "values"


class TransferQueue(Producing, Consuming):
    """Samples × columns, with leases and acks.

    **Rows.** A run of a group ends with no, one or several rows (:meth:`put_run`) or fails (:meth:`fail_run`). Rows are
    visible to a consumer from the moment that its columns are there. A row that fails or whose group is dropped is
    gone: whoever still works on it is not punished; columns put into it and acks of it are ignored.

    **Groups** settle when all their runs have ended: enough surviving rows, and the group is published; too few, and
    it is dropped and its slot refilled. When a row of a published group fails, the same rule decides again. Once a
    consumer has leased a group as a whole, it does not change any more.

    **Backpressure.** :meth:`put_run` waits while ``max_rows`` or ``max_bytes`` would be exceeded (rows count until they
    are deleted, so acked rows count until their commit). Rows of a ticket that a consumer waits for *now*, and of the
    oldest unfinished ticket while a consumer waits for any row in vain, and no other one has any to work on, are let in
    whatever the limits say; further columns of rows that are there are never held back. So what a trainer waits for can
    always be finished: the limits bound how far producers run ahead, not the batch itself.

    **Threads.** All methods are called on one event loop.
    """

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, retirement, derivation, drop, release and loss, in order, as dicts.

        Whoever keeps them in a file through ``on_ledger`` may clear the list.
        """
        return self._state.ledger

    def drain_failures(self) -> dict[str, str]:
        """What did not become training data since the last call: rows, runs and groups, by id, and why."""
        failures, self._state.failures = self._state.failures, {}
        return failures

    def stats(self) -> dict[str, int]:
        """Rows, bytes, and open tickets and groups."""
        state = self._state
        return {
            "rows": state.row_count,
            "bytes": state.byte_count,
            "tickets": sum(len(partition.tickets) for partition in state.partitions.values()),
            "groups_open": sum(group.state == "open" for group in state.groups.values()),
            "rows_leased": sum(len(consumer.leased) for consumer in state.consumers.values()),
        }

    def state_dict(self) -> dict[str, Any]:
        """The controller's state as plain JSON values: published groups, acks, tickets. Values are the backend's.

        Leased rows are saved as ready, open groups as slots to fill again.
        """
        return state_dict(self._controller)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Replace everything by what :meth:`state_dict` returned. Consumers that are registered keep their columns."""
        load_state(self._controller, saved)

    async def checkpoint(self, folder: str | Path, *, at_cut: Callable[[], None] | None = None) -> None:
        """Write controller and values, as they are at one moment, to ``folder``. Producers go on; deletions wait.

        Args:
            folder: made when it is not there.
            at_cut: called at that moment, so that others can note where they are.
        """
        self._check()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        async with self._deleting:
            text = await self._cut(folder, at_cut)
        partial = folder / f"{STATE_FILE}.partial"
        with partial.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(folder / STATE_FILE)
        if self._journal is not None:
            self._journal.sync()

    def _begin_journal(self, text: str | None = None) -> None:
        """Let the journal begin with the state as it is now."""
        if self._journal is not None:
            self._state.changes.entries.clear()
            self._state.changes.slots.clear()
            self._journal.begin(self._state_text() if text is None else text)

    def _state_text(self, **more: str) -> str:
        """The state, and the marks of the checkpoints after which it came: a journal goes on from no other."""
        state = {**self.state_dict(), "marks": self._marks, **more}
        return json.dumps(state, ensure_ascii=False, separators=(",", ":"))

    async def _cut(self, folder: Path, at_cut: Callable[[], None] | None) -> str:
        """Write values, and note the controller's state of the moment at which they are cut; without lost rows."""
        while True:
            await self.fail_lost()
            mark = uuid.uuid4().hex
            self._marks = [*self._marks[1 - _MARKS :], mark]
            text = self._state_text(mark=mark)
            if at_cut is not None:
                at_cut()
            self._begin_journal(text)
            try:
                await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
            except QueueError as error:
                if error.code != "queue.lost":
                    raise
                continue  # a part of the store died meanwhile; the rest makes the next attempt
            return text

    async def clear(self, folder: str | Path) -> None:
        """Forget everything; of a durable backend also what it kept of an earlier run.

        Args:
            folder: for an empty checkpoint, which the backend reads; whoever holds the backend reaches it. It is
                removed afterwards.

        Raises:
            QueueError: ``queue.not-empty`` when the backend cannot read the checkpoint: it has a format of its own.
        """
        self._check()
        async with self._deleting:
            self._state.discarded.clear()
            if (found := await self.backend.stats()).rows:
                write_archive(Path(folder), ())
                try:
                    await self.backend.restore(SnapshotRequest(folder=str(folder)))
                except QueueError as error:
                    raise QueueError(
                        "the queue's backend holds rows of an earlier run, and cannot forget them",
                        code="queue.not-empty",
                        expected="no rows where a run begins anew",
                        found=f"{found.rows} rows, {found.bytes} bytes",
                        fix="remove them with the store's own tools, or give this run another folder",
                    ) from error
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
            if found.rows or any(partition.next_ticket for partition in self._state.partitions.values()):
                self._state.record("clear", rows=found.rows)
            consumers = self.state_dict()["consumers"]
            empty = {"consumers": consumers, "partitions": {}, "discarded": {}, "lineage": {}, "committed": None}
            self.load_state_dict({**empty, "format": FORMAT})
            self._marks = []
            self._begin_journal()

    async def restore(self, folder: str | Path) -> None:
        """Replace everything by what :meth:`checkpoint` wrote.

        Raises:
            QueueError: ``queue.invalid`` when the folder holds no complete checkpoint.
        """
        self._check()
        saved = _saved_state(folder)
        async with self._deleting:
            self._state.discarded.clear()
            await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            self.load_state_dict(saved)
            self._marks = [saved["mark"]]
            self._begin_journal()
        await self._delete_now()  # before a group is made again whose rows have the same keys

    async def recover(self, folder: str | Path, step: int, *, kept: Sequence[str] = ()) -> bool:
        """Go on with what the journal and a durable backend have, after the death of the process that wrote them.

        Everything is as the last call left it, but that leases have ended, that groups which had not settled are slots
        to fill again, and that acks of steps after ``step`` count no more. Samplers are as in the checkpoint. The
        ledger is the caller's concern, as with :meth:`restore`.

        Args:
            folder: the checkpoint with which the trainer goes on.
            step: the last one that it contains; its acks are final.
            kept: consumers whose acks stay: their work is in the queue, not in the trainer's checkpoint.

        Returns:
            whether that could be done; else there is no journal, or one from which ``step`` cannot be restored.

        Raises:
            QueueError: ``queue.invalid`` for a damaged journal, or one of another format.
        """
        self._check()
        saved, checkpoint = None, _saved_state(folder)
        if self._journal is not None:
            saved = read_journal(self._journal.path)
        if saved is None or checkpoint["mark"] not in saved["marks"]:
            return False  # another run, or the same one without a journal, was here meanwhile
        if saved["committed"] is not None and saved["committed"] > step:
            return False
        samplers = checkpoint["consumers"]
        for name, consumer in saved["consumers"].items():
            consumer["epoch"] = (consumer["epoch"] | _EPOCHS) + 1  # later ones than the dead process may have given
            consumer["sampler"] = samplers.get(name, consumer)["sampler"]
        async with self._deleting:
            self._state.discarded.clear()
            self.load_state_dict(saved)
            for name, living in self._state.consumers.items():
                if name not in kept:
                    self._leases.take_back(living, step)
            self._controller.consume(self._leases.commit(step))
            self._controller.offer_unfinished()
            self._marks = saved["marks"]
            self._begin_journal()
        await self._delete_now()  # as after a restore
        return True

    async def flush(self) -> None:
        """Return when the backend has forgotten every row that nobody needs."""
        self._check()
        await self._delete_now()


def _saved_state(folder: str | Path) -> dict[str, Any]:
    file = Path(folder) / STATE_FILE
    if not file.is_file():
        raise QueueError("the folder holds no checkpoint of a queue", where=str(folder), expected=STATE_FILE)
    saved: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return saved
