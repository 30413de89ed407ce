"""What trainers and other consumers call: leases, reads, acks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jackfield.abc.transfer_queue import Column, TransferQueueBackend
from jackfield.errors import QueueError
from jackfield.queue.meta import BatchMeta, Ticket, partition_of
from jackfield.queue.reuse import Reuse
from jackfield.queue.rows import Rows
from jackfield.queue.samplers import Sampler

__all__ = ["Consuming"]


class Consuming(ABC):
    """The consumers' side of a :class:`~jackfield.queue.TransferQueue`."""

    backend: TransferQueueBackend  #: where this process writes and reads values

    @abstractmethod
    async def register_consumer(
        self,
        name: str,
        partition: str,
        columns: Sequence[str],
        *,
        lease_seconds: float | None = None,
        sampler: Sampler | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """Announce a consumer: rows of ``partition`` that have ``columns`` are ready for it.

        It gets each of them once; or, with ``reuse``, whole groups as often as that says. Rows are deleted when every
        registered consumer of their partition is finally done with them. Again with the same partition and columns:
        the other arguments are taken over.

        Args:
            name: of the consumer.
            partition: whose rows it takes.
            columns: that it needs.
            lease_seconds: how long its leases hold; None: as long as the process that has them lives.
            sampler: chooses among what is ready; None: first ready, first served. Its state is in the queue's
                checkpoints.
            reuse: of groups that :meth:`sample_groups` gives; None: each once.

        Raises:
            QueueError: when the name is registered for something else.
        """

    @abstractmethod
    async def lease(
        self,
        consumer: str,
        max_samples: int | None = None,
        deadline_seconds: float = 600.0,
        sampler: Sampler | None = None,
    ) -> BatchMeta:
        """Ready rows, whether or not their groups have settled; returns as soon as there is one.

        Args:
            consumer: registered.
            max_samples: at most; None: all that are ready.
            deadline_seconds: how long to wait for the first.
            sampler: chooses, in the place of the consumer's own.

        Raises:
            DeadlineExceeded: naming the columns that rows lack and the runs that have not ended.
        """

    @abstractmethod
    async def lease_groups(
        self, consumer: str, ticket: int | Ticket, groups: int | None = None, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """Whole published groups of one ticket, ordered by slot, run and sequence.

        Args:
            consumer: registered.
            ticket: number of a ticket, claimed or not yet.
            groups: None: all that the consumer has not had, as soon as the ticket is complete and all of them are
                ready; a number: so many (fewer at the end of the ticket, none after it), as soon as they are ready.
            deadline_seconds: how long to wait.

        Raises:
            DeadlineExceeded: naming slots without a group, runs that have not ended, columns that rows lack.
            QueueError: when the ticket has failed, naming the reasons, or has been consumed.
        """

    @abstractmethod
    async def sample_groups(
        self, consumer: str, groups: int, step: int, *, fresh: bool = True, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """Whole groups of any tickets, as the consumer's sampler chooses them: its order, each by run and sequence.

        Groups that are too stale at ``step`` are let go; those that rest after a use are not offered.

        Args:
            consumer: registered, with a sampler and with reuse where groups are used more than once.
            groups: so many.
            step: the trainer's step that will use them; cooldown and staleness are counted in steps.
            fresh: offer groups that the consumer has not used yet, too, and wait until there are enough. Without:
                those that it has used before, as many as there are, none perhaps, at once.
            deadline_seconds: how long to wait.

        Raises:
            DeadlineExceeded: naming runs that have not ended, columns that rows lack, and how many groups are used up.
        """

    async def get(self, target: BatchMeta | Sequence[str], columns: Sequence[str]) -> dict[str, Column]:
        """Read columns of rows, in order, without leasing.

        Raises:
            QueueError: ``queue.unknown-sample``, ``queue.column``.
        """
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        if not keys:
            raise QueueError("no rows are named", expected="one key at least")
        rows = Rows(self.backend)
        if isinstance(target, BatchMeta):
            return await rows.read(target, columns)
        return await rows.get(partition_of(keys[0]), keys, columns)

    @abstractmethod
    async def renew(self, batch: BatchMeta) -> None:
        """Begin the lease's time anew, for all rows that were leased together.

        Raises:
            LeaseError: when it does not hold any more.
        """

    @abstractmethod
    async def release(self, batch: BatchMeta) -> None:
        """Give leased rows back; they are ready again for the same consumer.

        Raises:
            LeaseError: when the lease does not hold any more.
        """

    @abstractmethod
    async def take_over(self, consumer: str) -> tuple[str, ...]:
        """End all leases of a consumer, whose holder is gone; returns the keys of the rows that are ready again.

        Whoever does its work from now on leases them anew. An ack under an old lease is refused.
        """

    @abstractmethod
    async def ack(self, batch: BatchMeta, step: int | None = None) -> tuple[str, ...]:
        """Be done with rows, provisionally: final with the commit of ``step``. Returns the keys that were acked.

        Args:
            batch: leased rows; groups that were leased as a whole are acked as a whole.
            step: the trainer's step that used the rows; None: final at once.

        Raises:
            LeaseError: when the lease does not hold any more; then nothing is acked.
        """

    @abstractmethod
    async def commit(self, step: int) -> None:
        """The trainer's checkpoint that contains all steps up to ``step`` is durable: their acks are final.

        Rows that every consumer has acked finally are deleted; the backend forgets them in the background
        (:meth:`flush`).
        """

    @abstractmethod
    async def rollback(self, step: int) -> tuple[str, ...]:
        """Take back the acks of all steps after ``step``; returns the keys of the rows that are ready again.

        Raises:
            QueueError: when later steps are committed already.
        """
