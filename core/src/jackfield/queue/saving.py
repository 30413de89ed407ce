"""Conversion of the queue's state to and from JSON rows, for store and checkpoints. Internal to the package.

Leases are not saved, and open groups become vacant places.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import msgspec

from jackfield.errors import QueueError
from jackfield.queue.meta import Lineage, NewGroup, Reuse
from jackfield.queue.records import BatchState, Consumer, Group, Partition, Place, Sample, State, Use

FORMAT = 7
HEAD = "head"  #: key of the row that has everything but places
Row = tuple[str, str]  #: key and JSON

#: The request of a group, ends of its rollouts, samples and uses.
_Group = tuple[NewGroup, dict[int, str | None], dict[str, Sample], dict[str, Use]]
#: Retry, reissue, explorer, whether it is consumed, reasons, and the group if it is published.
_Place = tuple[int, int, str | None, bool, list[str], _Group | None]
#: Partition, columns that are read and written, reuse, epoch and the state of the sampler.
_Consumer = tuple[str, frozenset[str], frozenset[str], Reuse | None, int, dict[str, Any]]


@attrs.frozen
class LedgerEnd:
    """The end of the ledger at the time of a checkpoint."""

    number: int = 0
    digest: str = ""  #: digest of the last entry, chained over all entries


@attrs.frozen(kw_only=True)
class Head:
    """The row with all state but places."""

    committed: int
    marks: list[str]
    consumers: dict[str, _Consumer]
    partitions: dict[str, tuple[int, dict[int, tuple[int, int, str | None]]]]  #: next batch; per batch: places,
    #: expected rollouts and failure
    mark: str = ""  #: id of this checkpoint
    ledger: LedgerEnd | None = None  #: None: the ledger was only in memory
    format: int = FORMAT


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, frozenset) else attrs.asdict(value, recurse=False)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode


def head_row(state: State, below: Mapping[str, int] | None = None, **checkpoint: Any) -> Row:
    """Return the row with all state but places. It is written whenever it has changed."""
    partitions = {}
    for name, partition in state.partitions.items():
        batches = {each.number: (len(each.places), each.rollouts, each.failure) for each in _batches(partition, below)}
        partitions[name] = (min(partition.next_batch, (below or {}).get(name, partition.next_batch)), batches)
    consumers = {
        name: (each.partition.name, each.columns, each.writes, each.reuse, each.epoch, each.sampler.state_dict())
        for name, each in state.consumers.items()
    }
    known = {"consumers": consumers, "partitions": partitions, **checkpoint}
    return HEAD, _encode(Head(committed=state.committed, marks=state.marks, **known))


def _batches(partition: Partition, below: Mapping[str, int] | None) -> Iterator[BatchState]:
    first = (below or {}).get(partition.name, partition.next_batch)
    return (batch for number, batch in partition.batches.items() if number < first)


def place_row(place: Place) -> Row:
    """Return the row of a place, with its group if that is published."""
    made = place.published
    saved = None if made is None else (made.new, made.ended, made.samples, made.uses)
    value = (place.retry, place.reissue, place.explorer, place.is_consumed, place.reasons, saved)
    return place_key(place), _encode(value)


def place_key(place: Place) -> str:
    return f"{place.batch.name}/{place.index}"


def every_row(state: State, below: Mapping[str, int] | None = None, **checkpoint: Any) -> list[Row]:
    """Return all rows of a state. ``below`` has, by partition, the first batch that is saved as not yet begun."""
    batches = [batch for partition in state.partitions.values() for batch in _batches(partition, below)]
    return [head_row(state, below, **checkpoint), *(place_row(place) for batch in batches for place in batch.places)]


@attrs.frozen(eq=False)
class Saved:
    """A saved state: its rows and its lineage."""

    rows: Mapping[str, str]  #: by key
    lineage: Mapping[str, Lineage]  #: derivations of its samples and their ancestors
    head: Head = attrs.field(init=False)

    @head.default
    def _read_head(self) -> Head:
        head = json.loads(self.rows.get(HEAD, "{}"))
        if head.get("format") != FORMAT:
            raise QueueError("the queue's state has another format", expected=FORMAT, found=head.get("format"))
        return msgspec.convert(head, Head, str_keys=True)

    def state(self) -> State:
        """Return a new state from the rows. Raise an error if a row is missing."""
        state = State(committed=self.head.committed, marks=list(self.head.marks))
        for name, (partition, columns, writes, reuse, epoch, _) in self.head.consumers.items():
            state.add_consumer(Consumer(name, Partition(partition), columns, writes, reuse, epoch))
        for name, (next_batch, batches) in self.head.partitions.items():
            place = state.partition(name)
            place.next_batch = next_batch
            for number, (places, rollouts, failure) in batches.items():
                batch = BatchState(place, number, rollouts, failure, is_offered=True)
                place.batches[number] = batch
                batch.places += [self._place(state, batch, index) for index in range(places)]
        return state

    def _place(self, state: State, batch: BatchState, index: int) -> Place:
        place = Place(batch, index)
        if (key := place_key(place)) not in self.rows:
            raise QueueError("a queue's saved state is not whole", expected="all of its rows", found=f"none of {key}")
        found = msgspec.convert(json.loads(self.rows[key]), _Place, str_keys=True)
        place.retry, place.reissue, place.explorer, place.is_consumed, place.reasons, saved = found
        if saved is None:
            place.reissue += place.explorer is not None and not place.is_consumed
            place.explorer = None
            return place
        new, ended, samples, uses = saved
        group = Group(place, new, ended, samples, uses, is_published=True)
        state.count(len(samples), sum(sample.bytes for sample in samples.values()))
        place.group = state.groups[group.name] = group
        state.provisional |= {group: None} if group.last_step() > state.committed else {}
        return place
