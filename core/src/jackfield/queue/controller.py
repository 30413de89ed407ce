"""The state and services that all parts of the queue share. Internal to the package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import attrs

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import partition_of
from jackfield.queue.records import BatchState, Consumer, Group, State, Status
from jackfield.queue.store import Store

_KEPT_FAILURES = 10_000
_SHOWN = 4  #: maximum number of samples or groups that a message names


@attrs.define(eq=False)
class Controller:
    """The shared state, store, waits, failures and pending deletions of the queue."""

    backend: TransferQueueBackend
    clock: Clock
    store: Store
    caller: Callable[[], str | None]  #: returns the calling client
    state: State = attrs.field(factory=State, init=False)
    is_closed: bool = attrs.field(default=True, init=False)
    change: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)  #: set at any change
    moved: float = attrs.field(default=0.0, init=False)  #: time of the last change of any group
    failures: dict[str, str] = attrs.field(factory=dict, init=False)  #: reasons of failed or dropped data, by name
    discarded: dict[str, list[str]] = attrs.field(factory=dict, init=False)  #: unused keys to delete, by partition
    deletion: asyncio.Task[None] | None = attrs.field(default=None, init=False)

    def require_open(self) -> None:
        if self.is_closed:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")
        if self.deletion is not None and self.deletion.done():
            error = self.deletion.exception()
            raise QueueError(f"the backend failed to delete samples: {error}") from error

    def wake(self) -> None:
        """Wake all waiters, which evaluate their conditions again."""
        self.change.set()
        self.change = asyncio.Event()

    async def wait(self, until: float, describe: Callable[[], str]) -> None:
        """Wait for the next change until a time of the clock. ``describe`` says what is missing at the deadline."""
        start = self.clock.time()
        try:
            await self.clock.wait_for(self.change.wait(), max(until - start, 0.0), "the TransferQueue")
        except DeadlineExceeded:
            message, fix = f"waited {until - start:.6g} s for", "look at why it did not come, or raise the deadline"
            raise DeadlineExceeded(f"{message} {describe()}", fix=fix) from None
        self.require_open()

    def touch(self, group: Group) -> None:
        """Record that a group has changed, so that it is stored and its batch's deadlines restart."""
        self.store.changed[group] = None
        group.batch.moved = self.moved = self.clock.time()

    def record(self, event: str, **fields: Any) -> None:
        """Add an entry to the ledger."""
        self.store.coming.append({"event": event, "time": self.clock.time(), **fields})

    def fail(self, subject: str, reason: str) -> None:
        """Record why something will not become training data."""
        self.failures[subject] = reason
        if len(self.failures) > _KEPT_FAILURES:
            del self.failures[next(iter(self.failures))]

    def discard(self, keys: Iterable[str], partition: str | None = None) -> None:
        """Schedule the deletion of values from the backend."""
        for key in keys:
            self.discarded.setdefault(partition or partition_of(key), []).append(key)


def missing(consumer: Consumer, number: int | None, count: int | None) -> str:
    """Describe why a consumer does not get ``count`` groups of a batch, or (None) of any batch."""
    batches = consumer.partition.batches
    wanted = f"{count or 1} groups" if number is None else f"batch {number}"
    head = f"{wanted} of partition {consumer.partition.name!r} for consumer {consumer.name!r}"
    if number is not None and number not in batches:
        return f"{head}; no explorer has claimed it"
    found = list(batches.values()) if number is None else [batches[number]]
    ready = sum(consumer.is_fresh(group) for batch in found for group in batch.groups)
    return "; ".join([head, f"{ready} groups are ready", *_lacking(found, consumer)])


def unfinished(batch: BatchState) -> str:
    """Describe why a batch is not final."""
    return "; ".join([f"batch {batch.number} of partition {batch.partition.name!r}", *_lacking([batch])])


def _lacking(batches: Sequence[BatchState], consumer: Consumer | None = None) -> list[str]:
    groups = [group for batch in batches for group in batch.groups]
    running = [group for group in groups if group.status == Status.OPEN]
    found = {
        "indexes without a group": [str(group.index) for group in groups if group.status < Status.OPEN],
        "groups whose rollouts have not ended": [
            f"{group.name} (task {group.task_id!r}, rollouts {', '.join(map(str, group.running()))})"
            for group in running
        ],
    }
    if consumer is None:
        made = [group for group in groups if group.status == Status.PUBLISHED]
        found["groups that no consumer has leased"] = [group.name for group in made if not group.holders()]
        holders = {name for group in made if not group.is_acked() for name in group.holders()}
        found["consumers that have leased groups and not acked them"] = sorted(holders)
    else:
        found["samples lack columns"] = [
            f"{key} ({', '.join(sorted(consumer.columns - sample.columns))})"
            for group in groups
            for key, sample in group.samples.items()
            if not consumer.columns <= sample.columns
        ]
        spent = [group for group in groups if (use := group.uses.get(consumer.name)) and use.is_spent(consumer.reuse)]
        found["groups have been used as often as they may"] = [group.name for group in spent]
        found["groups are leased"] = [group.name for group in consumer.held]
    return [f"{len(names)} {what}: {some(names)}" for what, names in found.items() if names]


def some(names: Sequence[str]) -> str:
    """Return the first few names and the number of the others."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
