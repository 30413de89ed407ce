"""Going on from a checkpoint, or from what came after it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

import attrs

from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage
from jackfield.queue.records import Consumer
from jackfield.queue.saving import Row, every_row, load
from jackfield.queue.state import State
from jackfield.queue.store import Store, read_rows, uses
from jackfield.queue.tables import LedgerEnd

_EPOCHS = 0xFFFFFFFF  #: that one process gives at most


@attrs.frozen(kw_only=True, eq=False)
class Checkpoint:
    """What a checkpoint has of the queue beside values."""

    rows: list[Row]
    lineage: Mapping[str, Lineage]
    mark: str
    ledger: LedgerEnd | None

    @classmethod
    def of(cls, state: State, store: Store, mark: str, again_from: Mapping[str, int]) -> Checkpoint:
        """Cut one: the state as it is now."""
        rows = every_row(state, again_from)
        end = store.end
        rows.append(("meta", "mark", -1, -1, json.dumps(mark)))
        rows.append(("meta", "ledger", -1, -1, json.dumps(None if end is None else attrs.asdict(end))))
        keys = [key for group in state.groups.values() for key in group.samples]
        return cls(rows=rows, lineage=store.ancestors(keys), mark=mark, ledger=end)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """
        Raises:
            QueueError: ``queue.invalid`` where there is none, or it is damaged.
        """
        rows, lineage = read_rows(path)
        meta = {row[1]: json.loads(row[4]) for row in rows if row[0] == "meta"}
        if not {"mark", "ledger"} <= meta.keys():
            raise QueueError("a queue's checkpoint is not whole", where=str(path), expected="a mark and a ledger")
        end = None if meta["ledger"] is None else LedgerEnd(**meta["ledger"])
        return cls(rows=rows, lineage=lineage, mark=meta["mark"], ledger=end)

    def state(self, clock: Clock) -> State:
        """Make a new state of it."""
        return load(self.rows, clock)

    def keys(self, clock: Clock) -> set[str]:
        """Return the keys of its samples."""
        return {key for group in self.state(clock).groups.values() for key in group.samples}


def newest(living: State, store: Store, saved: Checkpoint, step: int) -> State | None:
    """Find the newest state, where it came after a checkpoint and can go back to ``step``."""
    state = living if saved.mark in living.marks else _kept(store, saved, living.clock)
    if state is None or (state.committed is not None and state.committed > step):
        return None
    return state


def _kept(store: Store, saved: Checkpoint, clock: Clock) -> State | None:
    """Read the state of a process that is gone."""
    if not store.durable:
        return None
    try:
        rows = store.rows()
        state = load(rows, clock) if rows else None
    except QueueError as error:
        if error.code != "queue.invalid":
            raise
        message = "the queue's saved state is damaged (%s): what was made since the checkpoint is made again"
        logging.getLogger("jackfield").warning(message, error)
        return None
    if state is None or saved.mark not in state.marks:
        return None  # another run, or the same one without a durable queue, was here meanwhile
    samplers = saved.state(clock).consumers
    for name, consumer in state.consumers.items():
        consumer.epoch = (consumer.epoch | _EPOCHS) + 1  # later than any that the dead process may have given
        consumer.saved_sampler = samplers.get(name, consumer).saved_sampler
    return state


def adopt(living: State, saved: State) -> None:
    """Replace everything by a saved state, but what consumers are registered for. Waiters look again."""
    for partition in living.partitions.values():
        for batch in partition.batches.values():
            batch.explorers.clear()  # what was handed out is in vain
        partition.batches, partition.offered, partition.next_batch = {}, [], 0
    living.wake()
    for name, loaded in saved.partitions.items():
        partition = living.partition(name)
        partition.bits, partition.batches, partition.next_batch = loaded.bits, loaded.batches, loaded.next_batch
        for batch in loaded.batches.values():
            batch.partition = partition
    for name, loaded_consumer in saved.consumers.items():
        if name not in living.consumers:
            loaded_consumer.partition = living.partition(loaded_consumer.partition.name)
            loaded_consumer.partition.consumers.append(loaded_consumer)
            living.consumers[name] = loaded_consumer
    for name, consumer in living.consumers.items():
        _take_over(consumer, saved.consumers.get(name))
    living.groups, living.committed = saved.groups, saved.committed
    living.samples, living.bytes = saved.samples, saved.bytes
    living.entries += saved.entries
    living.discarded.clear()
    living.places.clear()
    living.batches.clear()


def _take_over(consumer: Consumer, saved: Consumer | None) -> None:
    """Let a registered consumer go on where a saved one was."""
    consumer.ready, consumer.used, consumer.leases, consumer.holders = {}, {}, {}, {}
    if saved is None:
        consumer.pending = {}
        return
    consumer.pending, consumer.epoch = saved.pending, max(consumer.epoch, saved.epoch)
    if saved.saved_sampler:
        consumer.sampler.load_state_dict(saved.saved_sampler)


def go_back(state: State, store: Store, saved: Checkpoint, step: int | None) -> None:
    """Say in the ledger which acks after a checkpoint do not count; with a step those of later ones alone."""
    if saved.ledger is None or store.end is None:
        return
    for consumer, keys in uses(store.entries(saved.ledger.number)).items():
        void = [key for key, steps in keys.items() for each in steps if _is_void(each, step)]
        if void:
            state.record("rollback", consumer=consumer, step=step, keys=void)


def _is_void(acked: int | None, step: int | None) -> bool:
    return step is None or (acked is not None and acked > step)
