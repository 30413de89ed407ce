"""The TransferQueue: what producers and consumers talk to."""

from __future__ import annotations

import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, cast

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.queue.batches import Batches
from jackfield.queue.checkpoints import Checkpoints
from jackfield.queue.deletion import Deletion
from jackfield.queue.groups import Groups
from jackfield.queue.leases import Leases
from jackfield.queue.listing import lost_samples
from jackfield.queue.meta import (
    Batch,
    BatchMeta,
    GroupKey,
    NewGroup,
    Notice,
    Reuse,
    RolloutReport,
    Written,
    partition_of,
)
from jackfield.queue.missing import some
from jackfield.queue.records import Partition
from jackfield.queue.samplers import SamplerSpec
from jackfield.queue.state import State
from jackfield.queue.store import Store

__all__ = ["VALUES_FOLDER", "TransferQueue"]

P = ParamSpec("P")
T = TypeVar("T")

VALUES_FOLDER = "values"
_MARKS = 8  #: of checkpoints that a state remembers
_GONE = "its values are gone from the store, or damaged in it"


def mutates(
    method: Callable[Concatenate[TransferQueue, P], Awaitable[T]],
) -> Callable[Concatenate[TransferQueue, P], Coroutine[Any, Any, T]]:
    """Make a method whose changes are in the store when its caller hears of them."""

    @functools.wraps(method)
    async def called(self: TransferQueue, *args: P.args, **kwargs: P.kwargs) -> T:
        self._require_open()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._store.write(self._state)

    return cast(Callable[Concatenate["TransferQueue", P], Coroutine[Any, Any, T]], called)


class TransferQueue:
    """Samples × columns in groups and batches, leased and acked exactly once.

    It holds metadata only: values go straight to a backend (:class:`~jackfield.queue.values.Values`).

    **Groups.** The rollouts of a group end with no, one or several samples or fail (:meth:`end_rollouts`). With the
    last of them the group settles: with enough samples it is published; else it is dropped and its index made again.
    When a sample of a published group fails, the same rule decides again. A sample that is gone is no one's error:
    columns that are added to it and acks of it are ignored, and its values are deleted.

    **Consumers.** A *stage* is registered with the columns that it ``writes``, and is done with a group when they are
    there. Any other consumer acks under a lease; once it has leased a group, the group does not change. Leases last
    until they are given back or acked, or until their holder ends.

    **Backpressure.** :meth:`groups_to_fill` gives no further group while ``max_samples`` or ``max_bytes`` would be
    exceeded. Groups of a batch that a consumer waits for *now* are given whatever the limits say, and those of the
    oldest batch that is not complete, while a consumer waits for any group in vain and no other one has work. So what a
    trainer waits for can always be finished: the limits bound how far producers run ahead.

    **Threads.** All methods are called on one event loop.
    """

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
            backend: keeps the values.
            clock: through which every wait goes.
            store: file of the ledger and of the state; None: in memory.
            durable: keep the state with every call, beside a durable backend; else only the ledger.
            max_samples: how many samples there may be before producers are held back.
            max_bytes: the same in bytes of values.
            max_retries: how often one index of a batch may be made again before the batch fails.
        """
        self.backend = backend
        self.clock = clock
        self.caller: Callable[[], str | None] = lambda: None  #: the client that calls
        #: is called when the queue has become another one, with the clients whose explorers had batches
        self.on_reset: Callable[[str, frozenset[str]], None] = lambda reason, explorers: None
        self.served: Callable[[], Mapping[str, int]] = dict  #: further counts for :meth:`stats`
        self._state = State(clock, is_closed=True)
        self._store = Store(store, durable=durable)
        self._leases = Leases(self._state, lambda groups: self._groups.consume(groups), lambda: self.caller())
        self._groups = Groups(self._state, self._leases, max_retries)
        write = functools.partial(self._store.write, self._state)
        self._batches = Batches(self._state, self._groups.end_group, write, max_samples, max_bytes)
        self._explorers: dict[str, set[str]] = {}  #: by client
        self._deletion = Deletion(backend, self._state, write)
        self._checkpoints = Checkpoints(
            backend, self._state, self._store, self._leases, self._deletion, self.fail_lost, self._begin_again
        )

    # -- life

    async def start(self) -> None:
        """Start the backend, and the deletion of what nothing needs."""
        await self.backend.start()
        self._state.is_closed = False
        self._deletion.start()

    async def close(self) -> None:
        """End every wait with ``queue.closed``, and close store and backend. Idempotent."""
        self._state.is_closed = True
        self._state.wake()
        await self._deletion.stop()
        self._store.close()
        await self.backend.close()

    def _require_open(self) -> None:
        self._state.require_open()
        self._deletion.require_well()

    @mutates
    async def end_holder(self, client: str) -> None:
        """End the leases of a client that is gone, and let others have the batches of its explorers."""
        for explorer in sorted(self._explorers.pop(client, ())):
            self._batches.release(explorer)
        self._leases.end(lambda consumer, epoch: consumer.holders[epoch] == client)

    # -- producers

    @mutates
    async def claim_batch(
        self,
        partition: str,
        explorer: str,
        groups: int,
        *,
        rollouts: int = 1,
        below: int | None = None,
        deadline_seconds: float = 600.0,
    ) -> Batch | None:
        """Take the next batch to make; None when all below ``below`` are final.

        Batches that were given back, with the groups that they had published, come first; they keep their own number of
        groups. Where all below ``below`` are claimed, it waits: another explorer's may be given back. Without ``below``
        it never waits.

        Args:
            partition: of the batch.
            explorer: that makes the batch.
            groups: of a new batch.
            rollouts: that a group of it probably has; backpressure counts with it.
            below: the first number that is not to be made.
            deadline_seconds: how long nothing may happen while no consumer works with complete batches.

        Raises:
            DeadlineExceeded: naming an unfinished batch.
            QueueError: ``queue.batch-failed`` when one of them has failed.
        """
        batch = await self._batches.claim(
            partition, explorer, groups, rollouts=rollouts, below=below, seconds=deadline_seconds
        )
        client = self.caller()
        if batch is not None and client is not None:
            self._explorers.setdefault(client, set()).add(explorer)
        return batch

    @mutates
    async def release_batches(self, explorer: str) -> tuple[Batch, ...]:
        """Take the unfinished batches of a dead explorer back; they are handed out again.

        Their open groups are dropped (without counting as retries) and the same attempts are made again; published
        groups stay.
        """
        return self._batches.release(explorer)

    def groups_to_fill(
        self, batch: Batch, deadline_seconds: float, *, until: Literal["final", "published"] = "final"
    ) -> AsyncIterator[tuple[GroupKey, ...]]:
        """Iterate over lists of groups to make: at once all that are vacant and have room, later those to make again.

        Args:
            batch: that the explorer has claimed.
            deadline_seconds: how long nothing may happen to the batch, while no consumer works with its groups.
            until: ``final``: end when a consumer has acked all groups, so that none can be dropped any more.
                ``published``: end when all are published; if one is dropped afterwards, the batch is offered to the
                next claimant.

        Raises:
            DeadlineExceeded: naming rollouts, groups or consumers that are waited for.
            QueueFull: there was no room for a group in time.
            QueueError: ``queue.batch-failed`` when a group was made again too often; or the batch was taken back.
        """
        return self._batches.groups_to_fill(batch, deadline_seconds, until)

    @mutates
    async def open_groups(self, groups: Sequence[NewGroup]) -> None:
        """Announce groups, which begin now.

        Raises:
            QueueError: when one is not this explorer's to make any more; those before it in the list are open.
        """
        for group in groups:
            self._groups.open(group)

    @mutates
    async def end_rollouts(self, reports: Sequence[RolloutReport]) -> tuple[str, ...]:
        """Record that rollouts have ended; the values of their samples are in the backend.

        Returns:
            Keys that were not taken, because the group was dropped or the rollout reported before. Their values are
            deleted.
        """
        stray = [key for report in reports for key in self._groups.end(report)]
        self._discard(stray)
        return tuple(stray)

    def _discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._state.discard(partition_of(key), [key])

    @mutates
    async def drop_groups(self, groups: Sequence[str], reason: str) -> None:
        """Drop groups that no consumer which acks has leased, and have them made again; skip those that are gone.

        Raises:
            QueueError: when one is leased, or never was there; then none is dropped.
        """
        self._groups.drop(groups, reason)

    @mutates
    async def fail_samples(self, reasons: Mapping[str, str]) -> None:
        """Fail samples, by key; the policy of their groups decides again. Samples that are gone are skipped.

        Raises:
            QueueError: when a consumer which acks has leased such a group; then no sample is failed.
        """
        self._groups.fail(reasons)

    @mutates
    async def fail_lost(self, meta: BatchMeta | None = None, keys: Sequence[str] = ()) -> tuple[str, ...]:
        """Fail the samples whose values the backend has lost; groups with too few samples left are made again.

        A group that an end consumer has leased is its own concern: it may have read everything. Where it has not, it
        names its batch here, gives it back and leases its groups again. What it has acked is not made again.

        Args:
            meta: what the caller holds.
            keys: samples that the backend has named already (``found`` of ``queue.lost``).

        Returns:
            Keys of lost samples that are not in the queue any more.

        Raises:
            LeaseError: when the lease does not hold any more.
        """
        lost = list(dict.fromkeys([*keys, *sorted(await lost_samples(self.backend, self._state))]))
        mine = [] if meta is None else [group for groups in self._leases.held(meta).values() for group in groups]
        there = [key for key in lost if self._state.knows(key)]
        self._groups.lose(there, mine, _GONE)
        failed = [key for key in there if not self._state.knows(key)]
        if failed:
            logging.getLogger("jackfield").warning(
                "values of %d samples are gone from the queue's store, or damaged in it; what is needed of them is "
                "made again: %s",
                *(len(failed), some(failed)),
            )
        return tuple(key for key in lost if not self._state.knows(key))

    @mutates
    async def add_columns(self, target: BatchMeta | Sequence[str], written: Written) -> tuple[str, ...]:
        """Note that columns of samples are in the backend; consumers whose columns are complete wake.

        The holder of a lease may replace columns; without a lease a column is written once.

        Returns:
            The keys of samples that are still there; of the others the values are deleted.

        Raises:
            LeaseError: when the lease does not hold any more.
            QueueError: ``queue.unknown-sample``, or ``queue.column`` for a column that is there.
        """
        leased = isinstance(target, BatchMeta)
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        if isinstance(target, BatchMeta):
            self._leases.held(target, whole=False)
        stray = self._groups.add(keys, written, replace=leased)
        self._discard(stray)
        return tuple(key for key in keys if key not in set(stray))

    async def new_samples(self, partition: str) -> AsyncIterator[tuple[str, ...]]:
        """Iterate over the keys of samples as their rollouts end, first those that are there; nothing is leased.

        Samples that have the columns of all stages are left out. The iteration ends when the queue closes.
        """
        found = self._state.partition(partition)
        feed = [key for group in found.groups() for key in group.samples]
        found.feeds.append(feed)
        try:
            while not self._state.is_closed:
                coming, feed[:] = tuple(key for key in feed if self._is_unfinished(found, key)), []
                if coming:
                    yield coming
                else:
                    await found.announced.next()
        finally:
            found.feeds.remove(feed)

    def _is_unfinished(self, partition: Partition, key: str) -> bool:
        place = self._state.sample(key) if self._state.knows(key) else None
        if place is None:
            return False
        wanted = partition.mask(name for consumer in partition.consumers for name in consumer.writes)
        return not wanted or place[1].columns & wanted != wanted

    # -- consumers

    @mutates
    async def register_consumer(
        self,
        name: str,
        partition: str,
        columns: Sequence[str],
        *,
        writes: Sequence[str] = (),
        sampler: SamplerSpec | None = None,
        reuse: Reuse | None = None,
    ) -> None:
        """Announce a consumer: groups of ``partition`` whose samples have ``columns`` are ready for it.

        Groups are deleted when every consumer of their partition is finally done with them. Again with the same
        partition and columns: the other arguments are taken over.

        Args:
            name: of the consumer.
            partition: whose groups it takes.
            columns: that it needs.
            writes: columns that it adds, where it is a stage.
            sampler: chooses among what is ready; None: in the order of batch and index. Its state is in checkpoints.
            reuse: of groups that :meth:`lease_groups` gives; None: each once.

        Raises:
            QueueError: when the name is registered for something else.
        """
        made = None if sampler is None else sampler.make()
        self._leases.register(name, self._state.partition(partition), tuple(columns), tuple(writes), made, reuse)

    async def lease_batch(
        self, consumer: str, batch: int, groups: int | None = None, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """Lease groups of one batch, ordered by index, rollout and sequence.

        Args:
            consumer: registered.
            batch: number of a batch, claimed or not yet.
            groups: None: all that the consumer has not had, as soon as the batch is complete and they are ready; a
                number: so many (fewer at the end of the batch, none after it), as soon as they are ready.
            deadline_seconds: how long to wait.

        Raises:
            DeadlineExceeded: naming groups that are not there, rollouts that go on, columns that samples lack.
            QueueError: when the batch has failed, or has been consumed.
        """
        self._require_open()
        return await self._leases.lease_batch(consumer, batch, groups, deadline_seconds)

    @mutates
    async def lease_groups(
        self,
        consumer: str,
        groups: int | None = None,
        *,
        step: int | None = None,
        fresh: bool = True,
        deadline_seconds: float = 600.0,
    ) -> BatchMeta:
        """Lease groups of any batch as the consumer's sampler chooses them.

        Groups that are too stale at ``step`` are given up; those that rest after a use are not offered.

        Args:
            consumer: registered.
            groups: so many; None: all that are ready, one at least.
            step: the trainer's step that will use them; cooldown and staleness are counted in steps.
            fresh: offer groups that the consumer has not used yet, too, and wait until there are enough. Without:
                those that it has used before, as many as there are, none perhaps, at once.
            deadline_seconds: how long to wait.

        Raises:
            DeadlineExceeded: naming rollouts that go on, columns that samples lack, and groups that are used up.
        """
        return await self._leases.lease_groups(consumer, groups, step, fresh, deadline_seconds)

    @mutates
    async def release(self, meta: BatchMeta) -> None:
        """Give leased groups back; they are ready again for the same consumer.

        Raises:
            LeaseError: when the lease does not hold any more.
        """
        self._leases.release(meta)

    @mutates
    async def take_over(self, consumer: str) -> tuple[str, ...]:
        """End all leases of a consumer, whose holder is gone; return the keys of the samples that are ready again."""
        mine = self._state.consumer(consumer)
        return tuple(self._leases.end(lambda each, epoch: each is mine))

    @mutates
    async def ack(self, meta: BatchMeta, step: int | None = None) -> None:
        """Be done with groups, provisionally: final with the commit of ``step``; without a step at once.

        Raises:
            LeaseError: when the lease does not hold any more; then nothing is acked.
        """
        self._leases.ack(meta, step)

    @mutates
    async def commit(self, step: int) -> None:
        """Make all acks up to ``step`` final: the checkpoint of the weights that contain them is durable."""
        self._leases.commit(step)

    # -- observing

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Every ack, commit, rollback, expiry, retirement, derivation, drop, release and loss, in order."""
        return [*self._store.entries(), *self._state.entries]

    async def drain_failures(self) -> dict[str, str]:
        """Return what did not become training data since the last call: samples, rollouts and groups, and why."""
        failures, self._state.failures = self._state.failures, {}
        return failures

    async def stats(self) -> dict[str, int]:
        """Count samples, bytes, and open batches and groups."""
        state = self._state
        leased = [group for each in state.consumers.values() for held in each.leases.values() for group in held]
        return {
            "samples": state.samples,
            "bytes": state.bytes,
            "batches": sum(len(partition.batches) for partition in state.partitions.values()),
            "groups_open": sum(group.state == "open" for group in state.groups.values()),
            "samples_leased": sum(len(group.samples) for group in leased),
            **self.served(),
        }

    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Tell all who wait for it the newest value of a topic, plain values: the weights that there are, for example.

        It is not kept over restarts of the controller: its sender posts it again when it begins.
        """
        self._require_open()
        before = self._state.notices.get(topic)
        self._state.notices[topic] = Notice(1 if before is None else before.number + 1, dict(value))
        self._state.noticed.notify()

    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """Return the newest notice of a topic, as soon as its number is above ``after``; the first is 1.

        Raises:
            DeadlineExceeded: when none was posted.
        """
        until = self.clock.time() + deadline_seconds
        self._require_open()
        while (notice := self._state.notices.get(topic)) is None or notice.number <= after:
            await self._state.wait(self._state.noticed.next(), until, lambda: f"a post of {topic!r}")
        return notice

    # -- keeping

    @mutates
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write state and values, as they are at one moment. Producers go on; deletions wait.

        Args:
            folder: made when it is not there; the process of the queue reaches it.
            again_from: by partition, the first batch that is saved as if nothing of it had been made. A durable queue
                keeps what there is.
        """
        await self._checkpoints.save(Path(folder), again_from or {})

    @mutates
    async def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Go on from a checkpoint, or from what came after it where that was kept; the ledger says which acks are void.

        What came after it is kept where the queue lived on, or where state and backend are durable and nothing of the
        checkpoint's samples is lost. Then everything is as the last call left it, but that leases have ended, that open
        groups are made again, and that acks of steps after ``step`` count no more. Samplers are the checkpoint's.

        Args:
            folder: of the checkpoint.
            step: the last one that it contains; its acks are final. None: only the checkpoint counts, as it is.

        Returns:
            Whether what came after the checkpoint was kept.

        Raises:
            QueueError: ``queue.invalid`` for a damaged checkpoint; ``queue.ledger`` where the ledger is not the one
                that it knows.
        """
        return await self._checkpoints.restore(Path(folder), step)

    @mutates
    async def clear(self) -> None:
        """Forget everything, the ledger included; of a durable backend also what it kept of an earlier run."""
        await self._checkpoints.clear()

    async def flush(self) -> None:
        """Return when the backend holds the samples of the queue and no others."""
        self._require_open()
        await self._deletion.sweep()

    def _begin_again(self) -> None:
        """Offer what there is: the state is another one."""
        explorers = frozenset(self._explorers)
        self._explorers.clear()
        self._leases.look_again()
        self._batches.offer_unfinished()
        self.on_reset("has made the queue another one; what was begun before is in vain", explorers)
