"""The TransferQueue: what producers and consumers talk to."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from jackfield.abc.transfer_queue import TransferQueueBackend
from jackfield.clock import Clock
from jackfield.queue.batches import Batches
from jackfield.queue.checkpoints import Checkpoints
from jackfield.queue.deletion import Deletion
from jackfield.queue.groups import Groups
from jackfield.queue.leases import Leases
from jackfield.queue.listing import lost_samples
from jackfield.queue.meta import Batch, BatchMeta, GroupKey, NewGroup, Notice, Reuse, RolloutReport, Written
from jackfield.queue.samplers import SamplerSpec
from jackfield.queue.state import State
from jackfield.queue.store import Store

F = TypeVar("F", bound=Callable[..., Any])


def mutates(method: F) -> F:
    """Make a method whose changes are in the store when its caller hears of them."""

    @functools.wraps(method)
    async def called(self: TransferQueue, *args: Any, **kwargs: Any) -> Any:
        self._require_open()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._store.write(self._state)

    return cast(F, called)


class TransferQueue:
    """Samples × columns in groups and batches, leased and acked exactly once.

    It holds metadata only: values go straight to a backend (:class:`~jackfield.queue.values.Values`). The text of
    :mod:`jackfield.queue` says what groups, consumers and backpressure are. All methods are called on one event loop.
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
            backend: Keeps the values.
            clock: Time source for all waits.
            store: The file of ledger and state; None: in memory. ``durable`` keeps the state with every call.
            max_samples: The number of samples at which producers wait; ``max_bytes``: of bytes.
            max_retries: How often one index of a batch may be made again before the batch fails.
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
        self._deletion = Deletion(backend, self._state, write)
        self._checkpoints = Checkpoints(
            backend, self._state, self._store, self._leases, self._deletion, self.fail_lost, self._begin_again
        )

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
        self._batches.release_client(client)
        self._leases.end(lambda consumer, epoch: consumer.holders[epoch] == client)

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

        Backpressure counts with ``rollouts``, how many a group of a new batch probably has. The deadline counts while
        nothing happens and no consumer works with complete batches.

        Raises:
            DeadlineExceeded: naming an unfinished batch.
            QueueError: ``queue.batch-failed`` when one of them has failed.
        """
        client, seconds = self.caller(), deadline_seconds
        return await self._batches.claim(
            partition, explorer, groups, rollouts=rollouts, below=below, seconds=seconds, client=client
        )

    @mutates
    async def release_batches(self, explorer: str) -> tuple[Batch, ...]:
        """Take the unfinished batches of a dead explorer back; they are handed out again.

        Their open groups are dropped, which is no retry; published groups stay.
        """
        return self._batches.release(explorer)

    def groups_to_fill(
        self, batch: Batch, deadline_seconds: float, *, until: Literal["final", "published"] = "final"
    ) -> AsyncIterator[tuple[GroupKey, ...]]:
        """Iterate over lists of groups to make: at once all that are vacant and have room, later those to make again.

        It ends when a consumer has acked all groups, so that none can be dropped any more (``final``), or when all are
        published; if one is dropped afterwards, the batch is offered to the next claimant. The deadline counts while
        nothing happens to the batch and no consumer works with its groups.

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

        Return the keys that were not taken: the group was dropped, or the rollout reported before. Their values are
        deleted.
        """
        return self._state.discard_keys(tuple(key for report in reports for key in self._groups.end(report)))

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

        A group that an end consumer has leased is left alone: the consumer may have read everything. Where it has not,
        it names its batch (``meta``), gives it back and leases its groups again. What it has acked is not made again.
        ``keys`` are samples that the backend has named already (``found`` of ``queue.lost``).

        Return the keys of lost samples that are not in the queue any more.
        """
        lost = [*keys, *sorted(await lost_samples(self.backend, self._state))]
        mine = [] if meta is None else [group for groups in self._leases.held(meta).values() for group in groups]
        return self._groups.lose(lost, mine)

    @mutates
    async def add_columns(self, target: BatchMeta | Sequence[str], written: Written) -> tuple[str, ...]:
        """Note that columns of samples are in the backend; consumers whose columns are complete wake.

        The holder of a lease may replace columns; without a lease a column is written once.

        Return the keys of samples that are still there; of the others the values are deleted.

        Raises:
            LeaseError: when the lease does not hold any more.
            QueueError: ``queue.unknown-sample``, or ``queue.column`` for a column that is there.
        """
        if isinstance(target, BatchMeta):
            self._leases.held(target, whole=False)
        keys = target.keys if isinstance(target, BatchMeta) else tuple(target)
        stray = set(self._state.discard_keys(self._groups.add(keys, written, replace=isinstance(target, BatchMeta))))
        return tuple(key for key in keys if key not in stray)

    def new_samples(self, partition: str) -> AsyncIterator[tuple[str, ...]]:
        """Iterate over the keys of samples as their rollouts end, first those that are there; nothing is leased.

        Samples that have the columns of all stages are left out. The iteration ends when the queue closes.
        """
        return self._groups.new_samples(partition)

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
            name: The name of the consumer, of groups of ``partition``.
            columns: The columns that it needs; ``writes``: those that it adds, where it is a stage.
            sampler: Chooses among what is ready; None: in order. Its state is in checkpoints.
            reuse: How often :meth:`lease_groups` gives a group; None: once.

        Raises:
            QueueError: when the name is registered for something else.
        """
        made = None if sampler is None else sampler.make()
        self._leases.register(name, self._state.partition(partition), tuple(columns), tuple(writes), made, reuse)

    async def lease_batch(
        self, consumer: str, batch: int, groups: int | None = None, deadline_seconds: float = 600.0
    ) -> BatchMeta:
        """Lease groups of one batch, ordered by index, rollout and sequence.

        With ``groups`` None: all that the consumer has not had, as soon as the batch is complete and they are ready;
        with a number: so many (fewer at the end of the batch, none after it), as soon as they are ready.

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

        Without ``groups`` all that are ready are given, at least one. With ``fresh`` groups that the consumer has not
        used yet are offered, too, and it waits until there are enough; without, those that it has used before are given
        at once, as many as there are. Cooldown and staleness are counted in steps of the trainer (``step``).

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
        return {**self._state.stats(), **self.served()}

    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Replace the newest value of a topic, plain values; it does not outlive the controller."""
        self._state.post(topic, value)

    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """Return the newest notice of a topic, as soon as its number is above ``after``; the first is 1.

        Raises:
            DeadlineExceeded: when none was posted.
        """
        return await self._state.wait_notice(topic, after, deadline_seconds)

    @mutates
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write state and values, as they are at one moment. Producers go on; deletions wait.

        ``again_from`` names by partition the first batch that is saved as if nothing of it had been made. A durable
        queue keeps what there is.
        """
        await self._checkpoints.save(Path(folder), again_from or {})

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
        self._leases.look_again()
        clients = self._batches.offer_unfinished()
        self.on_reset("has made the queue another one; what was begun before is in vain", clients)
