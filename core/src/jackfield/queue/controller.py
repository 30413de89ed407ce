"""What all parts of the queue use: its state and store, waits, ledger entries and notices. Internal to the package."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield.queue.meta import Lineage, Notice, partition_of
from jackfield.queue.records import Place, State
from jackfield.queue.store import Store

F = TypeVar("F", bound=Callable[..., Any])

_KEPT_FAILURES = 10_000


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
        self._state, self._store, self._is_closed = State(), Store(store, durable=durable), True
        self._moved = 0.0  #: time of the last change of any place
        self._waiting = set[asyncio.Future[None]]()
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
        waiting, self._waiting = self._waiting, set()
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _next_change(self) -> asyncio.Future[None]:
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    async def _wait(self, until: float, describe: Callable[[], str]) -> None:
        """Wait for the next change, until a time of the clock.

        Raises:
            DeadlineExceeded: naming what ``describe`` says *then*.
            QueueError: ``queue.closed``.
        """
        start = self.clock.time()
        try:
            await self.clock.wait_for(self._next_change(), max(until - start, 0.0), "the TransferQueue")
        except DeadlineExceeded:
            raise DeadlineExceeded(
                f"waited {until - start:.6g} s for {describe()}",
                fix="look at why it did not come, or raise the deadline",
            ) from None
        self._require_open()

    # -- changes

    def _touch(self, place: Place) -> None:
        """Note that a place has changed: the store follows, and deadlines of its batch begin again."""
        self._store.places[place] = None
        place.batch.moved = self._moved = self.clock.time()

    def _record(self, event: str, **fields: Any) -> None:
        """Add an entry to the ledger."""
        self._store.coming.append({"event": event, "time": self.clock.time(), **fields})

    def _derive(self, lineage: Mapping[str, Lineage]) -> None:
        """Remember what samples were made of."""
        for key, made in lineage.items():
            self._store.derived[key] = made
            self._record("derive", key=key, operation=made.operation, parents=list(made.parents))

    def _fail(self, subject: str, reason: str) -> None:
        """Remember what will not become training data."""
        self._failures[subject] = reason
        if len(self._failures) > _KEPT_FAILURES:
            del self._failures[next(iter(self._failures))]

    def _discard(self, keys: Iterable[str], partition: str | None = None) -> None:
        """Let the backend forget values."""
        for key in keys:
            self._discarded.setdefault(partition or partition_of(key), []).append(key)
