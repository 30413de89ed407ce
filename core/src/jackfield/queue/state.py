"""Everything that a controller knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.changes import Changes
from jackfield.queue.lineage import Lineage, ancestors
from jackfield.queue.meta import Notice
from jackfield.queue.records import Consumer, Group, Partition, Row
from jackfield.queue.waiting import Signal

__all__ = ["State"]

_KEPT_FAILURES = 10_000


@attrs.define(eq=False, repr=False)
class State:
    """Everything the controller knows."""

    clock: Clock
    partitions: dict[str, Partition] = attrs.field(factory=dict)
    consumers: dict[str, Consumer] = attrs.field(factory=dict)
    groups: dict[str, Group] = attrs.field(factory=dict)  #: until their ticket is consumed
    rows: dict[str, Row] = attrs.field(factory=dict)
    next_serial: int = 0
    row_count: int = 0  #: in the backend or on the way there
    byte_count: int = 0
    committed: int | None = None  #: the last step whose acks are final
    ledger: list[dict[str, Any]] = attrs.field(factory=list)  #: empty where something else keeps the entries
    on_ledger: Callable[[dict[str, Any]], None] = attrs.field(
        default=attrs.Factory(lambda self: self.ledger.append, takes_self=True)
    )
    lineage: dict[str, Lineage] = attrs.field(factory=dict)  #: of rows that were made of others, and of their ancestors
    lineage_limit: int = 1024  #: entries, before those without a living descendant are forgotten
    failures: dict[str, str] = attrs.field(factory=dict)
    discarded: dict[str, list[str]] = attrs.field(factory=dict)  #: keys by partition that the backend may forget
    discards: Signal = attrs.field(factory=Signal)
    room: Signal = attrs.field(factory=Signal)
    closed: bool = False
    changes: Changes = attrs.field(factory=Changes)  #: for the journal
    in_flight: dict[str, str] = attrs.field(factory=dict)  #: partitions by key: rows whose values are being put
    notices: dict[str, Notice] = attrs.field(factory=dict)  #: by topic
    noticed: Signal = attrs.field(factory=Signal)

    def partition(self, name: str) -> Partition:
        if name not in self.partitions:
            self.partitions[name] = Partition(name, self.changes)
        return self.partitions[name]

    def consumer(self, name: str) -> Consumer:
        if name not in self.consumers:
            raise QueueError(
                f"no consumer {name!r} is registered",
                code="queue.unknown-consumer",
                where=name,
                expected=f"one of {', '.join(sorted(self.consumers)) or '(none)'}",
                fix="call register_consumer first",
            )
        return self.consumers[name]

    def group(self, group_id: str) -> Group:
        if group_id not in self.groups:
            raise QueueError(
                f"no group {group_id!r} is in the queue",
                code="queue.unknown-sample",
                where=group_id,
                fix="its ticket may have been consumed already",
            )
        return self.groups[group_id]

    def row(self, key: str) -> Row | None:
        """A row by key, or None when it was there once.

        Raises:
            QueueError: ``queue.unknown-sample`` when it never was.
        """
        found = self.rows.get(key)
        if found is None and not self._was_there(key):
            raise QueueError(f"no row {key!r} is in the queue", code="queue.unknown-sample", where=key)
        return found

    def _was_there(self, key: str) -> bool:
        """Keys are ``partition/batch/group/retry/rollout/sequence``."""
        group_id = key.rsplit("/", 2)[0]
        if group_id in self.groups:
            return True
        parts = group_id.rsplit("/", 3)
        partition = self.partitions.get(parts[0])
        if partition is None or len(parts) != 4 or not parts[1].isdigit():
            return False
        return int(parts[1]) < partition.next_ticket and int(parts[1]) not in partition.tickets

    def record(self, event: str, **fields: Any) -> None:
        """Append to the ledger."""
        self.on_ledger({"event": event, "time": self.clock.time(), **fields})

    def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Let everybody know the newest of a topic."""
        before = self.notices.get(topic)
        self.notices[topic] = Notice(1 if before is None else before.number + 1, dict(value))
        self.noticed.notify()

    def derive(self, key: str, lineage: Lineage) -> None:
        """Remember what a row was made of, as long as it or a row made of it lives; the ledger keeps it for ever."""
        self.lineage[key] = lineage
        self.changes.note("lineage", key, lineage.operation, list(lineage.parents))
        self.record("derive", key=key, operation=lineage.operation, parents=list(lineage.parents))
        if len(self.lineage) > self.lineage_limit:
            self.lineage = ancestors([*self.rows, key], self.lineage)
            self.lineage_limit = max(1024, 2 * len(self.lineage))

    def failed(self, subject: str, reason: str) -> None:
        """Remember, for :meth:`TransferQueue.drain_failures`, what will not become training data."""
        self.failures[subject] = reason
        if len(self.failures) > _KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def discard(self, partition: str, key: str) -> None:
        """Let the backend forget a row."""
        self.discarded.setdefault(partition, []).append(key)
        self.changes.note("forget", partition, [key])
        self.discards.notify()

    def release_room(self, rows: int, size: int) -> None:
        self.row_count -= rows
        self.byte_count -= size
        self.room.notify()
