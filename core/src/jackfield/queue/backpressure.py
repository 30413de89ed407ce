"""What holds producers back: room in the queue, unless somebody waits for just what they have."""

from __future__ import annotations

from collections.abc import Callable

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, QueueFull
from jackfield.queue.leases import Leases
from jackfield.queue.records import Group, Partition, TicketState
from jackfield.queue.state import State
from jackfield.queue.waiting import wait

__all__ = ["Backpressure"]


class Backpressure:
    """The controller's state, and its limits."""

    def __init__(
        self, state: State, *, max_samples: int | None = None, max_bytes: int | None = None, max_retries: int = 8
    ) -> None:
        self.state = state
        self.leases = Leases(state)
        self.max_samples = max_samples
        self.max_bytes = max_bytes
        self.max_retries = max_retries
        self.write_changes: Callable[[], None] = lambda: None  #: to the journal, where there is one

    @property
    def clock(self) -> Clock:
        """The one clock."""
        return self.state.clock

    async def wait_room(self, group_id: str, run: int, rows: int, size: int, deadline_seconds: float) -> None:
        """Hold a producer back while the queue is full; see :class:`jackfield.queue.TransferQueue`."""
        group = self.state.group(group_id)
        until = self.clock.time() + deadline_seconds
        while rows and not self._fits(rows, size) and not self._demanded(group.slot.ticket):
            try:
                await wait(self.clock, self.state.room.next(), until, lambda: "room")
            except DeadlineExceeded as error:
                raise self._full(group, run, rows, size, deadline_seconds) from error
            self.leases.require_open()
            self._require_running(group, run)

    @property
    def limited(self) -> bool:
        """Whether there is any backpressure."""
        return self.max_samples is not None or self.max_bytes is not None

    def _fits(self, rows: int, size: int) -> bool:
        return (self.max_samples is None or self.state.row_count + rows <= self.max_samples) and (
            self.max_bytes is None or self.state.byte_count + size <= self.max_bytes
        )

    def _demanded(self, ticket: TicketState) -> bool:
        """Whether a consumer waits for just this ticket, or in vain for any row while the others have nothing to do."""
        partition = ticket.partition
        if any(ticket.number in consumer.group_waiters for consumer in partition.consumers):
            return True
        busy = [consumer for consumer in partition.consumers if consumer.ready or consumer.leased]
        starving = any(
            (consumer.sample_demand or (consumer.row_demand and not consumer.ready))
            and all(other is consumer for other in busy)
            for consumer in partition.consumers
        )
        return starving and ticket is self._oldest_unfinished(partition)

    @staticmethod
    def _oldest_unfinished(partition: Partition) -> TicketState | None:
        tickets = partition.tickets.values()
        return next((ticket for ticket in tickets if not ticket.complete and not ticket.failure), None)

    def _full(self, group: Group, run: int, rows: int, size: int, seconds: float) -> QueueFull:
        state = self.state
        return QueueFull(
            f"the queue stayed full for {seconds:.6g} s",
            where=f"{group.id}/{run}",
            expected=f"room for {rows} rows and {size} bytes within {self.max_samples} rows and {self.max_bytes} bytes",
            found=f"{state.row_count} rows, {state.byte_count} bytes",
            fix="look at why consumers do not ack and commit, or raise max_samples, max_bytes or the deadline",
        )

    def _require_running(self, group: Group, run: int) -> None:
        if group.slot.ticket.failure is not None:
            raise group.slot.ticket.error()
        where = f"{group.id}/{run}"
        if not 0 <= run < group.runs:
            raise QueueError("the group has no such run", where=where, expected=f"0 to {group.runs - 1}", found=run)
        if group.state == "dropped":
            message = f"group {group.id} was dropped: {group.reason}"
            raise QueueError(message, where=where, fix="open a group in another slot")
        if run in group.ended or run in group.writing:
            raise QueueError("the run has ended already", where=where, expected="one put_run or fail_run for each run")
