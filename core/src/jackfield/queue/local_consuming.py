"""The consumers' side, where the controller lives in this process."""

from __future__ import annotations

from collections.abc import Sequence

from jackfield.errors import QueueError
from jackfield.queue.changes import journaled
from jackfield.queue.consuming import Consuming
from jackfield.queue.lifetime import Lifetime
from jackfield.queue.meta import BatchMeta, Ticket
from jackfield.queue.reuse import Reuse
from jackfield.queue.samplers import Sampler

__all__ = ["LocalConsuming"]


class LocalConsuming(Lifetime, Consuming):
    """Asks the controller."""

    @journaled
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
        """See :meth:`~jackfield.queue.TransferQueue.register_consumer`."""
        seconds = self._lease_seconds if lease_seconds is None else lease_seconds
        self._controller.register_consumer(name, partition, columns, seconds, sampler, reuse)

    async def lease(
        self,
        consumer: str,
        max_samples: int | None = None,
        deadline_seconds: float = 600.0,
        sampler: Sampler | None = None,
    ) -> BatchMeta:
        """See :meth:`~jackfield.queue.TransferQueue.lease`."""
        self._check()
        return await self._leases.lease(consumer, max_samples, deadline_seconds, sampler)

    async def lease_groups(
        self, consumer: str, ticket: int | Ticket, groups: int | None = None, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """See :meth:`~jackfield.queue.TransferQueue.lease_groups`."""
        self._check()
        number = ticket.number if isinstance(ticket, Ticket) else ticket
        return await self._leases.lease_groups(consumer, number, groups, deadline_seconds)

    @journaled
    async def sample_groups(
        self, consumer: str, groups: int, step: int, *, fresh: bool = True, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """See :meth:`~jackfield.queue.TransferQueue.sample_groups`."""
        self._check()
        if groups < 1:
            raise QueueError("at least one group is sampled", expected="1 or more", found=groups)
        return await self._leases.sample_groups(consumer, groups, step, fresh=fresh, deadline_seconds=deadline_seconds)

    async def renew(self, batch: BatchMeta) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.renew`."""
        self._leases.renew(batch)

    async def release(self, batch: BatchMeta) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.release`."""
        self._leases.release(batch)

    @journaled
    async def ack(self, batch: BatchMeta, step: int | None = None) -> tuple[str, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.ack`."""
        self._check()
        keys, consumed = self._leases.ack(batch, step)
        self._controller.consume(consumed)
        return tuple(keys)

    @journaled
    async def commit(self, step: int) -> None:
        """See :meth:`~jackfield.queue.TransferQueue.commit`."""
        self._check()
        self._controller.consume(self._leases.commit(step))

    async def take_over(self, consumer: str) -> tuple[str, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.take_over`."""
        self._check()
        return tuple(self._leases.take_over(consumer))

    @journaled
    async def rollback(self, step: int) -> tuple[str, ...]:
        """See :meth:`~jackfield.queue.TransferQueue.rollback`."""
        self._check()
        return tuple(self._leases.rollback(step))
