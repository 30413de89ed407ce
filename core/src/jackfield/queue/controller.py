"""What all parts of the queue use: its state and store, waits, ledger entries and notices. Internal to the package."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Notice, partition_of
from jackfield.queue.records import BatchState, Consumer, Group, Place, State
from jackfield.queue.store import Store

F = TypeVar("F", bound=Callable[..., Any])

_KEPT_FAILURES = 10_000
_SHOWN = 4  #: samples or groups that a message names


def mutates(method: F) -> F:
    """Make a method whose changes are in the store when its caller hears of them; then all who wait look again."""

    @functools.wraps(method)
    async def called(self: Controller, *args: Any, **kwargs: Any) -> Any:
        self._require_open()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._wake()
            self._store.write(self._state)

    return cast(F, called)


class Controller:
    """State, waits, ledger entries and notices."""

    def __init__(
        self,
        backend: TransferQueueBackend,
        clock: Clock,
        *,
        store: Path | None = None,
        durable: bool = False,
        max_samples: int | None = None,
        max_bytes: int | None = None,
        max_retries: int = 8,
    ) -> None:
        """
        Args:
            backend: Keeps the values.
            clock: Time source for all waits.
            store: The file of ledger and state; None: in memory. ``durable`` keeps the state with every call.
            max_samples: The number of samples at which producers wait; ``max_bytes``: of bytes.
            max_retries: How often one index of a batch may be made again before the batch fails.
        """
        self.backend, self.clock = backend, clock
        self.caller: Callable[[], str | None] = lambda: None  #: the client that calls
        #: is called when the queue has become another one, with the clients whose explorers had batches
        self.on_reset: Callable[[str, frozenset[str]], None] = lambda reason, explorers: None
        self.served: Callable[[], Mapping[str, int]] = dict  #: further counts for :meth:`stats`
        self._max_samples, self._max_bytes, self._max_retries = max_samples, max_bytes, max_retries
        self._mean = 0.0  #: bytes of a sample, the last time that there was one
        self._state, self._store, self._is_closed = State(), Store(store, durable=durable and store is not None), True
        self._moved = 0.0  #: time of the last change of any place
        self._change = asyncio.Event()
        self._clients: dict[str, str] = {}  #: of explorers that have claimed batches
        self._feeds: list[tuple[str, list[str]]] = []  #: partition and keys to come, of ``new_samples`` iterations
        self._discarded: dict[str, list[str]] = {}  #: keys by partition whose values nothing needs
        self._failures: dict[str, str] = {}
        self._notices: dict[str, Notice] = {}
        self._deleting = asyncio.Lock()
        self._deletion: asyncio.Task[None] | None = None

    # -- for everyone

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, retirement, derivation, drop, release and loss, in order."""
        return [*self._store.entries(), *self._store.coming]

    async def drain_failures(self) -> dict[str, str]:
        """Return what did not become training data since the last call: samples, rollouts and groups, and why."""
        failures, self._failures = self._failures, {}
        return failures

    async def stats(self) -> dict[str, int]:
        """Count samples, bytes, and open batches and groups."""
        state = self._state
        leased = [group for consumer in state.consumers.values() for group in consumer.held]
        return {
            "samples": state.samples,
            "bytes": state.bytes,
            "batches": len(state.batches()),
            "groups_open": sum(not group.is_published for group in state.groups.values()),
            "samples_leased": sum(len(group.samples) for group in leased),
            **self.served(),
        }

    @mutates
    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Replace the newest value of a topic, plain values; it does not outlive the controller."""
        before = self._notices.get(topic)
        self._notices[topic] = Notice(1 if before is None else before.number + 1, dict(value))

    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """Return the newest notice of a topic, as soon as its number is above ``after``; the first is 1.

        Raises:
            DeadlineExceeded: when none was posted.
        """
        until = self.clock.time() + deadline_seconds
        self._require_open()
        while (notice := self._notices.get(topic)) is None or notice.number <= after:
            await self._wait(until, lambda: f"a post of {topic!r}")
        return notice

    # -- waits

    def _require_open(self) -> None:
        if self._is_closed:
            raise QueueError("the TransferQueue is closed", code="queue.closed", fix="start() it, and close it last")
        if self._deletion is not None and self._deletion.done():
            error = self._deletion.exception()
            raise QueueError(f"the backend failed to delete samples: {error}") from error

    def _wake(self) -> None:
        """Let all who wait look again."""
        self._change.set()
        self._change = asyncio.Event()

    async def _wait(self, until: float, describe: Callable[[], str]) -> None:
        """Wait for the next change, until a time of the clock; the error of the deadline says what is lacking then."""
        start = self.clock.time()
        try:
            await self.clock.wait_for(self._change.wait(), max(until - start, 0.0), "the TransferQueue")
        except DeadlineExceeded:
            message, fix = f"waited {until - start:.6g} s for", "look at why it did not come, or raise the deadline"
            raise DeadlineExceeded(f"{message} {describe()}", fix=fix) from None
        self._require_open()

    # -- changes

    def _touch(self, place: Place) -> None:
        """Note that a place has changed: the store follows, and deadlines of its batch begin again."""
        self._store.places[place] = None
        place.batch.moved = self._moved = self.clock.time()

    def _record(self, event: str, **fields: Any) -> None:
        """Add an entry to the ledger."""
        self._store.coming.append({"event": event, "time": self.clock.time(), **fields})

    def _fail(self, subject: str, reason: str) -> None:
        """Remember what will not become training data."""
        self._failures[subject] = reason
        if len(self._failures) > _KEPT_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _discard(self, keys: Iterable[str], partition: str | None = None) -> None:
        """Let the backend forget values."""
        for key in keys:
            self._discarded.setdefault(partition or partition_of(key), []).append(key)


# -- what a wait of a consumer or an explorer lacks, in words


def missing_batch(consumer: Consumer, number: int) -> str:
    """Say why a consumer does not get the groups of a batch."""
    partition = consumer.partition
    head = f"batch {number} of partition {partition.name!r} for consumer {consumer.name!r}"
    batch = partition.batches.get(number)
    if batch is None:
        return f"{head}; no explorer has claimed it"
    made, groups = sum(place.is_made for place in batch.places), batch.groups()
    ready = sum(group in consumer.ready for group in groups)
    parts = [f"{head}, {made} of whose {len(batch.places)} groups are published and {ready} ready"]
    if batch.is_offered:
        parts.append("it waits to be claimed again")
    if empty := _empty(batch):
        parts.append(f"indexes without a group: {some(empty)}")
    return "; ".join([*parts, *_lacking(consumer, groups)])


def missing_groups(consumer: Consumer, count: int, ready: int) -> str:
    """Say why a consumer does not get so many groups."""
    groups = list(consumer.partition.groups())
    parts = [
        f"{count} groups of partition {consumer.partition.name!r} for consumer {consumer.name!r}, {ready} are ready"
    ]
    parts += _lacking(consumer, groups)
    if spent := sum(
        consumer.name in each.uses and each.uses[consumer.name].is_spent(consumer.reuse) for each in groups
    ):
        parts.append(f"{spent} have been used as often as they may")
    if consumer.held:
        parts.append(f"{len(consumer.held)} are leased")
    return "; ".join(parts)


def unfinished(batch: BatchState) -> str:
    """Say what keeps a batch from being final."""
    head, groups = f"batch {batch.number} of partition {batch.partition.name!r}", batch.groups()
    if empty := _empty(batch):
        return f"{head}: no group was opened at the indexes {some(empty)}"
    if running := _running(groups):
        return f"{head}: groups that have not ended: {some(running)}"
    if free := [group.name for group in groups if not group.holders()]:
        return f"{head}: published groups that no consumer has leased: {some(free)}"
    names = {name for group in groups if not group.is_acked() for name in group.holders()}
    return f"{head}: consumers that have leased groups and not acked them: {', '.join(sorted(names))}"


def some(names: Sequence[str]) -> str:
    """Return the first few, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _empty(batch: BatchState) -> list[str]:
    return [str(place.index) for place in batch.places if place.group is None and not place.is_consumed]


def _lacking(consumer: Consumer, groups: Sequence[Group]) -> list[str]:
    parts = []
    lacking = [
        f"{key} ({', '.join(sorted(consumer.columns - sample.columns))})"
        for group in groups
        for key, sample in group.samples.items()
        if not consumer.columns <= sample.columns
    ]
    if lacking:
        parts.append(f"{len(lacking)} samples lack columns: {some(lacking)}")
    if running := _running(groups):
        parts.append(f"rollouts have not ended: {some(running)}")
    return parts


def _running(groups: Iterable[Group]) -> list[str]:
    return [
        f"{group.name} (task {group.new.task_id!r}, rollouts {', '.join(map(str, group.running()))})"
        for group in groups
        if not group.is_published
    ]
