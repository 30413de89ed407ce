"""The producers' side of the controller: runs, rows and columns; below it tickets, groups and backpressure.

The controller holds metadata only; no method here sees a tensor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from jackfield.errors import QueueError
from jackfield.queue.meta import BatchMeta
from jackfield.queue.records import Consumer, Group, Row
from jackfield.queue.reuse import Reuse
from jackfield.queue.samplers import Sampler
from jackfield.queue.saving import save_consumer
from jackfield.queue.state import State
from jackfield.queue.tickets import Tickets

__all__ = ["Controller"]


class Controller(Tickets):
    """Tickets, groups and rows by state; what consumers have of them is in :attr:`leases`."""

    def __init__(
        self, state: State, *, max_samples: int | None = None, max_bytes: int | None = None, max_retries: int = 8
    ) -> None:
        super().__init__(state, max_samples=max_samples, max_bytes=max_bytes, max_retries=max_retries)
        self.leases.consume = self.consume

    # -- consumers --------------------------------------------------------------------------------------------------

    def register_consumer(
        self,
        name: str,
        partition: str,
        columns: Sequence[str],
        lease_seconds: float,
        sampler: Sampler | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """See :meth:`jackfield.queue.TransferQueue.register_consumer`."""
        consumer = self.state.consumers.get(name)
        wanted = (partition, frozenset(columns))
        if consumer is None:
            consumer = self.leases.register(name, self.state.partition(partition), tuple(columns), lease_seconds)
        elif (found := (consumer.partition.name, frozenset(consumer.columns))) != wanted:
            raise QueueError(
                f"consumer {name!r} is registered already, for something else", where=name, expected=wanted, found=found
            )
        consumer.lease_seconds = lease_seconds
        if sampler is not None:
            consumer.sampler = sampler
        if reuse is not None:
            consumer.reuse = reuse
        self.state.changes.note("consumer", name, save_consumer(consumer))

    # -- runs -------------------------------------------------------------------------------------------------------

    def run_keys(self, group_id: str, run: int, rows: int) -> tuple[str, ...]:
        """Check that a run may end now; the keys of its rows."""
        self.leases.require_open()
        group = self.state.group(group_id)
        self._require_running(group, run)
        again = f"r{group.broken[run]}" if run in group.broken else ""
        return tuple(f"{group.id}/{run}{again}/{sequence}" for sequence in range(rows))

    @contextmanager
    def _writing(self, group: Group, run: int, keys: Sequence[str], size: int) -> Iterator[None]:
        group.writing.add(run)
        partition = group.partition.name
        if keys:
            self.state.in_flight.update(dict.fromkeys(keys, partition))
            self.state.changes.note("forget", partition, list(keys))  # unless the run ends with them
            self.write_changes()
        self.state.row_count += len(keys)
        self.state.byte_count += size
        try:
            yield
        except BaseException:
            self.state.release_room(len(keys), size)
            group.broken[run] = group.broken.get(run, 0) + 1
            for key in keys:
                self.state.discard(partition, key)
            raise
        finally:
            group.writing.discard(run)
            for key in keys:
                self.state.in_flight.pop(key, None)

    def writing(self, group_id: str, run: int, keys: Sequence[str], size: int) -> AbstractContextManager[None]:
        """While the values of a run's rows are on their way to the backend."""
        return self._writing(self.state.group(group_id), run, keys, size)

    def end_run(
        self,
        group_id: str,
        run: int,
        keys: Sequence[str],
        columns: Sequence[str],
        sizes: Sequence[int],
        tags: Sequence[Mapping[str, Any]],
    ) -> None:
        """The values of a run's rows are there: seal them.

        Raises:
            QueueError: when the group was dropped in the meantime.
        """
        state, group = self.state, self.state.group(group_id)
        group.writing.discard(run)
        self._require_running(group, run)
        bits = group.partition.mask(tuple(columns))
        touched: set[Consumer] = set()
        for sequence, key in enumerate(keys):
            row = Row(key, group, run, sequence, state.next_serial, tags[sequence], bits, bytes=sizes[sequence])
            state.next_serial += 1
            state.rows[key] = row
            group.rows.append(row)
            self.leases.row_changed(row, bits, touched)
        group.slot.ticket.rows += len(keys)
        group.ended[run] = None
        self._settle(group)
        self.leases.wake(touched)

    def fail_run(self, group_id: str, run: int, reason: str) -> None:
        """See :meth:`jackfield.queue.TransferQueue.fail_run`."""
        group = self.state.group(group_id)
        self._require_running(group, run)
        group.ended[run] = reason
        self.state.failed(f"{group.id}/{run}", reason)
        self._settle(group)

    def _settle(self, group: Group) -> None:
        """When all siblings have ended: publish or drop."""
        if group.state != "open" or len(group.ended) < group.runs:
            return
        if not group.satisfied():
            self._refill(group, _shortage(group))
            return
        group.sort()
        group.state = "published"
        group.slot.touch()
        ticket = group.slot.ticket
        ticket.published += 1
        self.leases.group_published(group)
        for feed in group.partition.feeds:
            feed.append(group.id)
        group.partition.fed.notify()
        group.settled.notify()
        ticket.changed.notify()

    # -- rows -------------------------------------------------------------------------------------------------------

    def fail_rows(self, keys: Sequence[str], reason: str) -> None:
        """See :meth:`jackfield.queue.TransferQueue.fail_rows`."""
        rows = [row for row in map(self.state.row, dict.fromkeys(keys)) if row is not None]
        groups = {row.group: None for row in rows}
        for group in groups:
            self._require_free(group)
        for row in rows:
            self.state.failed(row.key, reason)
            self._remove(row, "failed")
        for group in groups:
            if group.state == "published":
                if group.satisfied():
                    self.leases.group_published(group)
                else:
                    self._refill(group, reason)

    def lose_rows(self, keys: Sequence[str], batch: BatchMeta | None, reason: str) -> None:
        """The backend has lost rows: their groups' policy decides again.

        Groups that a consumer has leased as a whole are left alone, but those of ``batch``: it may have read them. Of
        groups that it has acked nothing is made again: nobody waits for them.
        """
        groups: dict[Group, list[Row]] = {}
        mine = {row.group for _, row in self.leases.held_rows(batch)} if batch is not None else set[Group]()
        for row in [row for row in map(self.state.rows.get, dict.fromkeys(keys)) if row is not None]:
            if row.group in mine or not row.group.held_by or row.group.is_acked():
                groups.setdefault(row.group, []).append(row)
        for group, lost in groups.items():
            self.state.record("lose", group=group.id, keys=[row.key for row in lost], reason=reason)
            if group.is_acked():
                self.leases.had(group)
                self.consume(lost)
                continue
            for row in lost:
                self.state.failed(row.key, reason)
                self._remove(row, "failed")
            if group.state == "published" and not group.satisfied():
                self.leases.take(group)
                self._refill(group, f"{_shortage(group)}; {reason}")
            elif group.state == "published":
                self.leases.group_published(group)

    # -- columns ----------------------------------------------------------------------------------------------------

    def begin_columns(
        self, keys: Sequence[str], columns: Sequence[str], batch: BatchMeta | None, overwrite: bool
    ) -> list[Row | None]:
        """Check that columns of rows may be written now; the rows, None where one is gone.

        The holder of a lease may write a column again: a worker that took over does what the dead one did.
        """
        self.leases.require_open()
        if len(set(keys)) != len(keys):
            raise QueueError("a row is named twice", expected="distinct keys", found=list(keys)[:4])
        if batch is not None and all(claim.epoch for claim in batch.claims):
            self.leases.held_rows(batch)
            overwrite = True
        rows = [self.state.row(key) for key in keys]
        for row in rows:
            if row is not None:
                bits = row.group.partition.mask(tuple(columns))
                clash = bits & (row.writing if overwrite else row.writing | row.columns)
                if clash:
                    raise QueueError(
                        f"column {', '.join(row.group.partition.names(clash))} of row {row.key} is written already",
                        code="queue.column",
                        where=row.key,
                        fix="write each column once, or pass overwrite=True",
                    )
        for row in rows:
            if row is not None:
                row.writing |= row.group.partition.mask(tuple(columns))
        return rows

    def end_columns(
        self,
        rows: Sequence[Row],
        columns: Sequence[str],
        sizes: Sequence[int],
        tags: Sequence[Mapping[str, Any]] | None,
        *,
        written: bool,
    ) -> tuple[str, ...]:
        """The values are there (or not, after a failure): rows that became complete are offered; the living keys."""
        touched: set[Consumer] = set()
        living = []
        for index, row in enumerate(rows):
            bits = row.group.partition.mask(tuple(columns))
            row.writing &= ~bits
            if row.status != "sealed":  # it went while its values were on their way
                self.state.discard(row.group.partition.name, row.key)
                continue
            living.append(row.key)
            if not written:
                continue
            row.group.slot.touch()
            if tags is not None:
                row.tags = {**row.tags, **tags[index]}
            new, row.columns = bits & ~row.columns, row.columns | bits
            if new:
                row.bytes += sizes[index]
                self.state.byte_count += sizes[index]
                self.leases.row_changed(row, new, touched)
        self.leases.wake(touched)
        return tuple(living)


def _shortage(group: Group) -> str:
    counted = Counter(why for _, why in sorted(group.ended.items()) if why is not None)
    if counted:
        return "; ".join(f"{count} × {why}" for why, count in counted.most_common(3))
    if group.minimum_rows is not None:
        return f"{len(group.rows)} of at least {group.minimum_rows} rows survive"
    alive = {row.run for row in group.rows}
    lost = [str(run) for run in range(group.runs) if run not in alive]
    return f"runs without a surviving row: {', '.join(lost)}"
