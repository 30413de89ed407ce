"""The TransferQueue: what producers and consumers talk to, wherever its controller lives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.queue.consuming import Consuming
from jackfield.queue.meta import Notice
from jackfield.queue.producing import Producing

__all__ = ["TransferQueue"]


class TransferQueue(Producing, Consuming):
    """Samples × columns, with leases and acks.

    Metadata is a controller's, in this process (:class:`~jackfield.queue.LocalQueue`) or in another one
    (:class:`~jackfield.queue.remote.RemoteQueue`); values go straight to a backend and never through the controller.

    **Rows.** A run of a group ends with no, one or several rows (:meth:`put_run`) or fails (:meth:`fail_run`). Rows are
    visible to a consumer from the moment that its columns are there. A row that fails or whose group is dropped is
    gone: whoever still works on it is not punished; columns put into it and acks of it are ignored.

    **Groups** settle when all their runs have ended: enough surviving rows, and the group is published; too few, and
    it is dropped and its slot refilled. When a row of a published group fails, the same rule decides again. Once a
    consumer has leased a group as a whole, it does not change any more.

    **Backpressure.** :meth:`put_run` waits above ``max_samples`` or ``max_bytes`` (rows count until they
    are deleted, so acked rows count until their commit). Rows of a ticket that a consumer waits for *now*, and of the
    oldest unfinished ticket while a consumer waits for any row in vain, and no other one has any to work on, are let in
    whatever the limits say; further columns of rows that are there are never held back. So what a trainer waits for can
    always be finished: the limits bound how far producers run ahead, not the batch itself.

    **Threads.** All methods are called on one event loop.
    """

    done = True  #: whether this process has no work left to do; the clients of a served queue hear who ends before

    clock: Clock  #: through which every wait goes

    # -- life

    @abstractmethod
    async def start(self) -> None:
        """Start the backend, and the controller or the connection to it."""

    @abstractmethod
    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close the backend. Idempotent."""

    # -- what is going on

    @abstractmethod
    async def drain_failures(self) -> dict[str, str]:
        """What did not become training data since the last call: rows, runs and groups, by id, and why."""

    @abstractmethod
    async def stats(self) -> dict[str, int]:
        """Rows, bytes, and open tickets and groups."""

    @abstractmethod
    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Tell everybody who waits for it the newest of a topic, plain values: the weights there are, say.

        It is not kept over restarts of the controller: who posts does so again when it begins.
        """

    @abstractmethod
    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """The newest notice of a topic, as soon as there is one whose number is above ``after``; the first is 1.

        Raises:
            DeadlineExceeded: when nobody has posted one.
        """

    # -- keeping

    @abstractmethod
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write controller and values, as they are at one moment, to ``folder``. Producers go on; deletions wait.

        Args:
            folder: made when it is not there; the controller's process reaches it.
            again_from: by partition, the first ticket that is saved as if nothing of it had been made. A queue with
                a journal keeps what there is.
        """

    @abstractmethod
    async def clear(self, folder: str | Path) -> None:
        """Forget everything, the ledger included; of a durable backend also what it kept of an earlier run.

        Args:
            folder: for an empty checkpoint, which the backend reads; whoever holds the backend reaches it. It is
                removed afterwards.

        Raises:
            QueueError: ``queue.store`` when the backend cannot read the checkpoint: it has a format of its own.
        """

    @abstractmethod
    async def restore(self, folder: str | Path, step: int | None = None) -> None:
        """Replace everything by what :meth:`checkpoint` wrote; the ledger says what it does not have.

        Args:
            folder: of the checkpoint.
            step: the last one that it contains; its acks are final. None: acks are as they were.

        Raises:
            QueueError: ``queue.invalid`` when the folder holds no complete checkpoint.
        """

    @abstractmethod
    async def recover(self, folder: str | Path, step: int, *, kept: Sequence[str] = ()) -> bool:
        """Go on with what the controller knows, or what its journal and a durable backend have, after a death.

        Everything is as the last call left it, but that leases have ended, that groups which had not settled are slots
        to fill again (where the controller lives, their explorers go on with them), and that acks of steps after
        ``step`` count no more. Samplers are as in the checkpoint. The ledger says so.

        Args:
            folder: the checkpoint with which the trainer goes on.
            step: the last one that it contains; its acks are final.
            kept: consumers whose acks stay: their work is in the queue, not in the trainer's checkpoint.

        Returns:
            whether that could be done; else there is no journal, or one from which ``step`` cannot be restored.

        Raises:
            QueueError: ``queue.invalid`` for a damaged journal, or one of another format.
        """

    @abstractmethod
    async def flush(self) -> None:
        """Return when the backend has forgotten every row that nobody needs."""
