"""The TransferQueue: what producers and consumers talk to."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from jackfield.abc.transfer_queue import DeleteRequest, KeysRequest, SnapshotRequest, TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.batches import Batches
from jackfield.queue.controller import Controller, some
from jackfield.queue.groups import Groups
from jackfield.queue.leases import Leases
from jackfield.queue.meta import Notice, group_of
from jackfield.queue.records import State
from jackfield.queue.saving import Row, Saved, every_row
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER, Store, read_checkpoint, uses

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])

_MARKS = 8  #: of checkpoints that a state remembers


def mutates(method: F) -> F:
    """Make a method whose changes are in the store when its caller hears of them; then all who wait look again."""

    @functools.wraps(method)
    async def called(self: TransferQueue, *args: Any, **kwargs: Any) -> Any:
        self._core.require_open()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._core.wake()
            self._core.store.write(self._core.state)

    return cast(F, called)


def _of(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Make a method of the queue of one of its parts."""

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, part), *args, **kwargs)

    made = called if inspect.isasyncgenfunction(method) else mutates(called)
    return cast(Callable[Concatenate[Any, P], R], made)


class TransferQueue:
    """Samples × columns in groups and batches, leased and acked exactly once.

    It holds metadata only: values go straight to a backend (:class:`~jackfield.queue.values.Values`). The text of
    :mod:`jackfield.queue` says what groups, consumers and backpressure are. All methods are called on one event loop.
    """

    claim_batch = _of("_batches", Batches.claim_batch)
    release_batches = _of("_batches", Batches.release_batches)
    end_holder = _of("_batches", Batches.end_holder)
    groups_to_fill = _of("_batches", Batches.groups_to_fill)
    open_groups = _of("_groups", Groups.open_groups)
    end_rollouts = _of("_groups", Groups.end_rollouts)
    new_samples = _of("_groups", Groups.new_samples)
    drop_groups = _of("_groups", Groups.drop_groups)
    fail_samples = _of("_groups", Groups.fail_samples)
    fail_lost = _of("_groups", Groups.fail_lost)
    add_columns = _of("_groups", Groups.add_columns)
    register_consumer = _of("_leases", Leases.register_consumer)
    lease_batch = _of("_leases", Leases.lease_batch)
    lease_groups = _of("_leases", Leases.lease_groups)
    release = _of("_leases", Leases.release)
    take_over = _of("_leases", Leases.take_over)
    ack = _of("_leases", Leases.ack)
    commit = _of("_leases", Leases.commit)

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
        kept = Store(store, durable=durable and store is not None)
        self._core = Controller(backend, clock, kept, lambda: self.caller())
        self._leases = Leases(self._core)
        self._groups = Groups(self._core, self._leases, max_retries)
        self._batches = Batches(self._core, self._groups, max_samples, max_bytes)
        self._notices: dict[str, Notice] = {}
        self._deleting = asyncio.Lock()

    async def start(self) -> None:
        """Start the backend, and the deletion of what nothing needs."""
        await self.backend.start()
        self._core.is_closed = False
        self._core.deletion = asyncio.create_task(self._delete())

    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close store and backend. Idempotent."""
        self._core.is_closed = True
        self._core.wake()
        deletion, self._core.deletion = self._core.deletion, None
        if deletion is not None:
            deletion.cancel()
            await asyncio.gather(deletion, return_exceptions=True)
        self._core.store.close()
        await self.backend.close()

    # -- what there is to know

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, retirement, derivation, drop, release and loss, in order."""
        return [*self._core.store.entries(), *self._core.store.coming]

    async def drain_failures(self) -> dict[str, str]:
        """Return what did not become training data since the last call: samples, rollouts and groups, and why."""
        failures, self._core.failures = self._core.failures, {}
        return failures

    async def stats(self) -> dict[str, int]:
        """Count samples, bytes, and open batches and groups."""
        state = self._core.state
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
        until = self._core.clock.time() + deadline_seconds
        self._core.require_open()
        while (notice := self._notices.get(topic)) is None or notice.number <= after:
            await self._core.wait(until, lambda: f"a post of {topic!r}")
        return notice

    # -- deletion

    async def _delete(self) -> None:
        """Delete values in the background. After a failure, which the next call raises, only room is lost."""
        while True:
            while not self._core.discarded:
                await self._core.change.wait()
            async with self._deleting:
                await self._forget_discarded()

    async def _forget_discarded(self) -> None:
        """Delete what no consumer needs; the caller holds the lock."""
        self._core.store.write(self._core.state)  # that it is not needed
        discarded, self._core.discarded = self._core.discarded, {}
        for partition, keys in discarded.items():
            await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))

    async def _discard_orphans(self) -> int:
        """Delete what the backend has and the queue does not know, of workers that died; return the number of samples.

        The caller holds the lock.
        """
        found = 0
        for partition, key in (await self.backend.keys(KeysRequest())).samples:
            group = self._core.state.groups.get(group_of(key))
            if not self._core.state.knows(key) and (group is None or group.is_published):
                self._core.discard([key], partition)
                found += 1
        await self._forget_discarded()
        return found

    async def flush(self) -> None:
        """Return when the backend holds the samples of the queue and no others."""
        self._core.require_open()
        async with self._deleting:
            await self._discard_orphans()

    # -- checkpoints

    @mutates
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write state and values, as they are at one moment. Producers go on; deletions wait.

        ``again_from`` names by partition the first batch that is saved as if nothing of it had been made. A durable
        queue keeps what there is.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        async with self._deleting:
            rows, keys = await self._cut(folder, {} if self._core.store.durable else again_from or {})
        self._core.store.save(folder / STORE_FILE, rows, keys)
        self._core.store.sync()
        await self.flush()

    async def _cut(self, folder: Path, again_from: Mapping[str, int]) -> tuple[list[Row], list[str]]:
        """Write values, and return the state of the moment at which they are cut; without lost samples."""
        while True:
            await self.fail_lost()
            mark = uuid.uuid4().hex
            self._core.state.marks = [*self._core.state.marks[1 - _MARKS :], mark]
            self._core.store.write(self._core.state)
            rows = every_row(self._core.state, again_from, mark=mark, ledger=self._core.store.end)
            keys = list(self._core.state.keys())
            try:
                await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
                return rows, keys
            except QueueError as error:
                named = [str(key) for key in error.found] if isinstance(error.found, list | tuple) else []
                if error.code != "queue.lost" or len(await self.fail_lost(keys=named)) < len(named):
                    raise  # a consumer works with them
                await self._forget_discarded()  # the rest makes the next attempt

    @mutates
    async def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Go on from a checkpoint, or from what came after it where that was kept; the ledger says which acks are void.

        What came after it is kept where the queue lived on, or where state and backend are durable and nothing of the
        checkpoint's samples is lost. Then everything is as the last call left it, but leases have ended, open groups
        are made again, and acks of steps after ``step`` do not count. ``step`` is the last one of the checkpoint, whose
        acks are final; with None only the checkpoint counts, as it is. Samplers are those of the checkpoint.

        Return whether what came after the checkpoint was kept.

        Raises:
            QueueError: ``queue.invalid`` for a damaged checkpoint; ``queue.ledger`` where the ledger is not the one
                that it knows.
        """
        saved = read_checkpoint(Path(folder) / STORE_FILE)
        if saved.head.ledger is not None and self._core.store.end is not None:
            self._core.store.verify(saved.head.ledger)
        async with self._deleting:
            newer = None if step is None else await self._newer(saved, step)
            if newer is None:
                await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            if newer is self._core.state:  # a trainer died, and this process lives
                self._leases.end(lambda consumer, hold: True)
            else:
                self._replace(newer or saved.state())
            for name, (*_, sampler) in saved.head.consumers.items():
                if sampler and name in self._core.state.consumers:
                    self._core.state.consumers[name].sampler.load_state_dict(sampler)
            self._void_acks(saved, step if newer else None)
            if step is not None:
                self._leases.take_back(step)
                await self._leases.commit(step)
            self._core.store.derived.update(saved.lineage)
            self._core.store.begin(every_row(self._core.state))
        await self.fail_lost()
        await self.flush()
        return newer is not None

    async def _newer(self, saved: Saved, step: int) -> State | None:
        """Find a state that came after a checkpoint, can go back to ``step``, and has all samples of the checkpoint."""
        state = self._core.state if saved.head.mark in self._core.state.marks else self._stored(saved)
        if state is None or state.committed > step:
            return None
        known = saved.state().keys()
        lost = await self._groups.lost(state) & known
        if not lost:
            return state
        groups = sorted(group.name for group in state.groups.values() if not known >= group.samples.keys())
        logging.getLogger("jackfield").warning(
            "%d samples are gone from the queue's store (%s): the queue goes on with the samples of its checkpoint, "
            "and what was made since is made again: %s",
            *(len(lost), some(sorted(lost)), f"groups {some(groups)}" if groups else "nothing"),
        )
        return None

    def _stored(self, saved: Saved) -> State | None:
        """Read the state of a process that is gone, where it came after a checkpoint."""
        try:
            found = self._core.store.saved() if self._core.store.durable else None
            # without the mark another run, or the same one without a durable queue, was here meanwhile
            return found.state() if found is not None and saved.head.mark in found.head.marks else None
        except QueueError as error:
            if error.code != "queue.invalid":
                raise
            message = "the queue's saved state is damaged (%s): what was made since the checkpoint is made again"
            logging.getLogger("jackfield").warning(message, error)
            return None

    def _replace(self, state: State) -> None:
        """Replace everything but what consumers are registered for. Waiters look again."""
        for consumer in self._core.state.consumers.values():
            if (before := state.consumers.get(consumer.name)) is not None:
                consumer.epoch = max(consumer.epoch, before.epoch)
            consumer.ready, consumer.used, consumer.held = {}, {}, {}
            state.add_consumer(consumer)
        self._core.state = state
        self._core.discarded.clear()
        self._leases.offer_again()
        for batch in state.batches():
            if batch.failure is None and (vacant := [place.index for place in batch.vacant()]):
                where = {"partition": batch.partition.name, "batch": batch.number}
                self._core.record("release", **where, groups=vacant, reason="the queue was restored")
        clients, self._batches.clients = frozenset(self._batches.clients.values()), {}
        self.on_reset("has made the queue another one; what was begun before is in vain", clients)

    def _void_acks(self, saved: Saved, step: int | None) -> None:
        """Say in the ledger which acks after a checkpoint do not count; with a step those of later ones alone."""
        if saved.head.ledger is None or self._core.store.end is None:
            return
        for consumer, keys in uses(self._core.store.entries(saved.head.ledger.number)).items():
            void = [
                key
                for key, steps in keys.items()
                for each in steps
                if step is None or (each is not None and each > step)
            ]
            if void:
                self._core.record("rollback", consumer=consumer, step=step, keys=void)

    @mutates
    async def clear(self) -> None:
        """Forget everything, the ledger included; of a durable backend also what it kept of an earlier run."""
        self._core.store.clear()
        async with self._deleting:
            before = self._core.state.samples or any(each.next_batch for each in self._core.state.partitions.values())
            self._replace(State())
            found = await self._discard_orphans()
            if found or before:
                self._core.record("clear", samples=found)
            self._core.store.begin(every_row(self._core.state))
