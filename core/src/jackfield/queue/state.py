"""Everything that the queue knows, and what of it the store does not have yet. Internal to the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import GroupKey, Lineage, Notice, group_of, partition_of
from jackfield.queue.records import BatchState, Consumer, Group, Partition, Place, Sample, Signal

_KEPT_FAILURES = 10_000


@attrs.define(eq=False, repr=False)
class State:
    """Everything that the queue knows, and what of it the store does not have yet."""

    clock: Clock
    partitions: dict[str, Partition] = attrs.field(factory=dict)
    consumers: dict[str, Consumer] = attrs.field(factory=dict)
    groups: dict[str, Group] = attrs.field(factory=dict)  #: open and published
    committed: int | None = None  #: the last step whose acks are final
    samples: int = 0
    bytes: int = 0
    room: Signal = attrs.field(factory=Signal)
    failures: dict[str, str] = attrs.field(factory=dict)
    notices: dict[str, Notice] = attrs.field(factory=dict)
    noticed: Signal = attrs.field(factory=Signal)
    discarded: dict[str, list[str]] = attrs.field(factory=dict)  #: keys by partition whose values nothing needs
    discards: Signal = attrs.field(factory=Signal)
    is_closed: bool = False
    marks: list[str] = attrs.field(factory=list)  #: of the last checkpoints, also of those that were broken off
    entries: list[dict[str, Any]] = attrs.field(factory=list)  #: for the ledger
    derived: dict[str, Lineage] = attrs.field(factory=dict)
    places: dict[Place, bool] = attrs.field(factory=dict)  #: changed; True: also what is written once
    batches: dict[BatchState, None] = attrs.field(factory=dict)  #: new, changed or gone

    def partition(self, name: str) -> Partition:
        return self.partitions.setdefault(name, Partition(name))

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

    def group(self, name: str) -> Group | None:
        """Find a group; None when it was there once.

        Raises:
            QueueError: ``queue.unknown-sample`` when it never was.
        """
        found = self.groups.get(name)
        if found is None and not self._was_there(GroupKey.of(name)):
            raise QueueError(f"{name!r} is not in the queue", code="queue.unknown-sample", where=name)
        return found

    def sample(self, key: str) -> tuple[Group, Sample] | None:
        """Find a sample and its group; None when it was there once.

        Raises:
            QueueError: ``queue.unknown-sample`` when its group never was there.
        """
        group = self.group(group_of(key))
        return None if group is None or key not in group.samples else (group, group.samples[key])

    def knows(self, key: str) -> bool:
        """Tell whether a sample is there."""
        group = self.groups.get(group_of(key))
        return group is not None and key in group.samples

    def _was_there(self, key: GroupKey) -> bool:
        partition = self.partitions.get(key.partition)
        if partition is None or not 0 <= key.batch < partition.next_batch:
            return False
        batch = partition.batches.get(key.batch)
        if batch is None:
            return True
        if not 0 <= key.index < len(batch.places):
            return False
        place = batch.places[key.index]
        return (key.retry, key.reissue) < (place.retry, place.reissue + place.is_consumed)

    def require_open(self) -> None:
        """Refuse to go on with a closed queue."""
        if self.is_closed:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")

    # -- what changes

    def touch(self, place: Place, *, whole: bool = False) -> None:
        """Note that a place has changed; ``whole``: also what of its group is written once."""
        self.places[place] = whole or self.places.get(place, False)

    def record(self, event: str, **fields: Any) -> None:
        """Add an entry to the ledger."""
        self.entries.append({"event": event, "time": self.clock.time(), **fields})

    def derive(self, lineage: Mapping[str, Lineage]) -> None:
        """Remember what samples were made of."""
        for key, made in lineage.items():
            self.derived[key] = made
            self.record("derive", key=key, operation=made.operation, parents=list(made.parents))

    def failed(self, subject: str, reason: str) -> None:
        """Remember what will not become training data."""
        self.failures[subject] = reason
        if len(self.failures) > _KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def count(self, samples: int, size: int) -> None:
        """Note that samples, or bytes of them, have come or (negative) gone."""
        self.samples += samples
        self.bytes += size
        if size <= 0:
            self.room.notify()

    def stats(self) -> dict[str, int]:
        """Count samples, bytes, and open batches and groups."""
        leased = [group for each in self.consumers.values() for held in each.leases.values() for group in held]
        return {
            "samples": self.samples,
            "bytes": self.bytes,
            "batches": sum(len(partition.batches) for partition in self.partitions.values()),
            "groups_open": sum(group.state == "open" for group in self.groups.values()),
            "samples_leased": sum(len(group.samples) for group in leased),
        }

    def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Replace the newest value of a topic."""
        self.require_open()
        before = self.notices.get(topic)
        self.notices[topic] = Notice(1 if before is None else before.number + 1, dict(value))
        self.noticed.notify()

    def discard(self, partition: str, keys: Iterable[str]) -> None:
        """Let the backend forget values."""
        for key in keys:
            self.discarded.setdefault(partition, []).append(key)
        self.discards.notify()

    def discard_keys(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Let the backend forget values of any partition; return the keys."""
        for key in keys:
            self.discard(partition_of(key), [key])
        return keys

    async def wait_notice(self, topic: str, after: int, seconds: float) -> Notice:
        """See :meth:`TransferQueue.wait_notice`."""
        until = self.clock.time() + seconds
        self.require_open()
        while (notice := self.notices.get(topic)) is None or notice.number <= after:
            await self.wait(self.noticed.next(), until, lambda: f"a post of {topic!r}")
        return notice

    def wake(self) -> None:
        """Wake every waiter: the queue closes, or is another one."""
        signals = [self.room, self.noticed]
        for partition in self.partitions.values():
            signals += [partition.offers, partition.announced]
            signals += [batch.changed for batch in partition.batches.values()]
        signals += [consumer.changed for consumer in self.consumers.values()]
        for signal in signals:
            signal.notify()

    async def wait(self, future: asyncio.Future[None], until: float, describe: Callable[[], str]) -> None:
        """Wait for a signal until a time of the clock.

        Raises:
            DeadlineExceeded: naming what ``describe`` says *then*.
            QueueError: ``queue.closed``.
        """
        start = self.clock.time()
        try:
            await self.clock.wait_for(future, max(until - start, 0.0), "the TransferQueue")
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"waited {until - start:.6g} s for {describe()}",
                fix="look at why it did not come, or raise the deadline",
            ) from None
        self.require_open()
