"""Acks: what consumers are done with, for now or for good."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jackfield.errors import QueueError
from jackfield.queue.meta import BatchMeta
from jackfield.queue.records import Ack, Consumer, Lease, Row
from jackfield.queue.reuse import Uses
from jackfield.queue.sampling import Sampling
from jackfield.queue.saving import save_consumer

__all__ = ["Leases"]


class Leases(Sampling):
    """What consumers have, may have and are done with."""

    def ack(self, batch: BatchMeta, step: int | None) -> tuple[list[str], list[Row]]:
        """Mark rows as done; returns the acked keys and the rows that nobody needs any more."""
        state = self._state
        leases = self._leases_of(batch)
        self._require_whole_groups(leases)
        final = step is None or (state.committed is not None and step <= state.committed)
        consumed: dict[Row, None] = {}
        for lease, rows in leases.items():
            consumer = lease.consumer
            self._note_uses(lease, rows, step)
            for row in rows:
                del consumer.leased[row]
                lease.rows.pop(row, None)
                consumer.acked[row] = Ack(step, final)
                if not final:
                    assert step is not None
                    consumer.provisional.setdefault(step, {})[row] = None
                elif self.finish(consumer, row):
                    consumed[row] = None
            self._forget_if_empty(lease)
            for slot in {row.group.slot: None for row in rows}:
                slot.touch()
            state.changes.note("consumer", consumer.name, save_consumer(consumer))
            for ticket in {row.group.slot.ticket: None for row in rows} if lease.whole else ():
                ticket.note_change()
            state.record("ack", consumer=consumer.name, step=step, epoch=lease.epoch, keys=[row.key for row in rows])
            if step is not None:
                self._trim(consumer, step)
            if consumer.reuse is not None:
                consumer.groups.news()  # they may be used again
        living = {row.key for rows in leases.values() for row in rows}
        return [key for key in batch.keys if key in living], list(consumed)

    @staticmethod
    def _note_uses(lease: Lease, rows: Iterable[Row], step: int | None) -> None:
        consumer = lease.consumer
        if consumer.reuse is not None and lease.whole:
            for group in {row.group: None for row in rows}:
                consumer.used.setdefault(group, Uses()).steps.append(step)

    def commit(self, step: int) -> list[Row]:
        """Make the acks of all steps up to ``step`` final; returns the rows that nobody needs any more."""
        state = self._state
        state.committed = step if state.committed is None else max(step, state.committed)
        state.changes.note("commit", state.committed)
        consumed: dict[Row, None] = {}
        for consumer in state.consumers.values():
            for earlier in sorted(other for other in consumer.provisional if other <= step):
                final = Ack(earlier, True)
                for row in consumer.provisional.pop(earlier):
                    if consumer.acked[row].step == earlier:
                        consumer.acked[row] = final
                    if self.finish(consumer, row):
                        consumed[row] = None
        state.record("commit", step=step, keys=[row.key for row in consumed])
        return list(consumed)

    def rollback(self, step: int) -> list[str]:
        """Take back the acks of all steps after ``step``; returns the keys."""
        state = self._state
        if state.committed is not None and step < state.committed:
            raise QueueError(
                "acks that are final cannot be taken back",
                expected=f"step {state.committed} or later",
                found=step,
                fix="load the queue's own checkpoint of that step",
            )
        returned: list[str] = []
        for consumer in state.consumers.values():
            acked, rows = self.take_back(consumer, step)
            if rows:
                state.record("rollback", consumer=consumer.name, step=step, keys=acked)
                returned += [row.key for row in rows]
        if not returned:
            state.record("rollback", consumer=None, step=step, keys=[])
        return returned

    def take_back(self, consumer: Consumer, step: int) -> tuple[list[str], list[Row]]:
        """A consumer has acked nothing after ``step``: keys of its acks and uses then, and rows that it let go, too."""
        later = sorted(other for other in consumer.provisional if other > step)
        noted = [(other, row) for other in later for row in consumer.provisional.pop(other)]
        acked = [row.key for other, row in noted if _acked_at(consumer, row, other)]
        rows = list(dict.fromkeys(row for _, row in noted))
        self._take_back(consumer, rows, step)
        return acked, rows

    def _take_back(self, consumer: Consumer, rows: Sequence[Row], step: int) -> None:
        """Rows were not acked after ``step``; a group that was used before it stays used."""
        for group in {row.group: None for row in rows}:
            group.slot.touch()
            uses = consumer.used.get(group)
            if uses is not None:
                uses.take_back(step)
                if not uses.steps:
                    del consumer.used[group]
        for row in rows:
            uses = consumer.used.get(row.group)
            if uses is None:
                del consumer.acked[row]
            else:
                last = uses.steps[-1]
                committed = self._state.committed
                consumer.acked[row] = Ack(last, last is None or (committed is not None and last <= committed))
        self._return(consumer, [row for row in rows if row not in consumer.leased], whole=True)
        consumer.ready = dict.fromkeys(sorted(consumer.ready, key=lambda row: row.serial))


def _acked_at(consumer: Consumer, row: Row, step: int) -> bool:
    """Whether a step used the row; else it let it go."""
    uses = consumer.used.get(row.group)
    return uses is None or step in uses.steps
