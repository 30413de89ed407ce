"""The TransferQueue: what producers and consumers talk to.

Here, client and controller live in one process; values go to a backend and never through the controller.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jackfield.abc.transfer_queue import SnapshotRequest
from jackfield.errors import QueueError
from jackfield.queue.archive import write_archive
from jackfield.queue.consuming import Consuming
from jackfield.queue.producing import Producing
from jackfield.queue.snapshot import FORMAT, load_state, state_dict

__all__ = ["STATE_FILE", "VALUES_FOLDER", "TransferQueue"]

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
    oldest unfinished ticket while a consumer waits for any row in vain, are let in whatever the limits say; further
    columns of rows that are there are never held back. So what a trainer waits for can always be finished: the limits
    bound how far producers run ahead, not the batch itself.

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

    async def _cut(self, folder: Path, at_cut: Callable[[], None] | None) -> str:
        """Write values, and note the controller's state of the moment at which they are cut; without lost rows."""
        while True:
            await self.fail_lost()
            text = json.dumps(self.state_dict(), ensure_ascii=False, separators=(",", ":"))
            if at_cut is not None:
                at_cut()
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

    async def restore(self, folder: str | Path) -> None:
        """Replace everything by what :meth:`checkpoint` wrote.

        Raises:
            QueueError: ``queue.invalid`` when the folder holds no complete checkpoint.
        """
        self._check()
        file = Path(folder) / STATE_FILE
        if not file.is_file():
            raise QueueError("the folder holds no checkpoint of a queue", where=str(folder), expected=STATE_FILE)
        async with self._deleting:
            self._state.discarded.clear()
            await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            self.load_state_dict(json.loads(file.read_text(encoding="utf-8")))

    async def flush(self) -> None:
        """Return when the backend has forgotten every row that nobody needs."""
        self._check()
        await self._delete_now()
