"""The queue's state as rows of text, and back: for the live file and for checkpoints alike."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import QueueError
from jackfield.queue.meta import Reuse
from jackfield.queue.records import BatchState, Consumer, Group, Partition, Place, Sample, Use
from jackfield.queue.state import State

FORMAT = 6
#: Kind, name (of a partition, or a consumer), batch, place and JSON; -1 where a kind has none.
Row = tuple[str, str, int, int, str]

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


# -- to rows


def every_row(state: State, again_from: Mapping[str, int] | None = None) -> list[Row]:
    """Save the whole state.

    Leases are not saved, and open groups are places to fill again. ``again_from`` names, by partition, the first batch
    that is saved as if nothing of it had been made.
    """
    below = again_from or {}
    rows = list(few_rows(state, below))
    for partition in state.partitions.values():
        for batch in _batches(partition, below):
            rows += [row for place in batch.places for row in place_rows(place, whole=True)]
    return rows


def few_rows(state: State, below: Mapping[str, int] | None = None) -> Iterator[Row]:
    """Save everything but places: a few rows, which are written whenever they have changed."""
    yield ("meta", "format", -1, -1, _encode(FORMAT))
    yield ("meta", "committed", -1, -1, _encode(state.committed))
    yield ("meta", "marks", -1, -1, _encode(state.marks))
    for consumer in state.consumers.values():
        yield ("consumer", consumer.name, -1, -1, _encode(_consumer(consumer)))
    for name, partition in state.partitions.items():
        batches = _batches(partition, below or {})
        following = min(partition.next_batch, (below or {}).get(name, partition.next_batch))
        value = {"next_batch": following, "batches": [batch.number for batch in batches]}
        yield ("partition", name, -1, -1, _encode(value))
        for batch in batches:
            value = {"places": len(batch.places), "rollouts": batch.rollouts, "failure": batch.failure}
            yield ("batch", name, batch.number, -1, _encode(value))


def _batches(partition: Partition, below: Mapping[str, int]) -> list[BatchState]:
    first = below.get(partition.name, partition.next_batch)
    return [batch for number, batch in partition.batches.items() if number < first]


def _consumer(consumer: Consumer) -> dict[str, Any]:
    return {
        "partition": consumer.partition.name,
        "columns": consumer.columns,
        "writes": consumer.writes,
        "epoch": consumer.epoch,
        "sampler": consumer.sampler.state_dict(),
        "reuse": None if consumer.reuse is None else attrs.asdict(consumer.reuse),
    }


def place_rows(place: Place, *, whole: bool) -> Iterator[Row]:
    """Save what changes of a place; ``whole``: also what of its group is written once."""
    at = (place.batch.partition.name, place.batch.number, place.index)
    group = place.published
    yield ("place", *at, _encode(_place(place) | ({} if group is None else _changing(group))))
    if whole and group is not None:
        yield ("body", *at, _encode(_lasting(group)))


def _place(place: Place) -> dict[str, Any]:
    return {
        "retry": place.retry,
        "reissue": place.reissue,
        "explorer": place.explorer,
        "consumed": place.is_consumed,
        "reasons": place.reasons,
    }


def _changing(group: Group) -> dict[str, Any]:
    masks = [sample.columns for sample in group.samples.values()]
    equal = len(set(masks)) == 1  # as nearly always
    made = {name: use for name, use in group.uses.items() if use.is_made()}
    return {
        "columns": [group.partition.names(mask) for mask in (masks[:1] if equal else masks)],
        "bytes": [sample.bytes for sample in group.samples.values()],
        "uses": {name: [use.steps, use.retired] for name, use in made.items()},
    }


def _lasting(group: Group) -> dict[str, Any]:
    return {
        "task_id": group.task_id,
        "rollouts": group.rollouts,
        "minimum_samples": group.minimum_samples,
        "tags": group.tags,
        "ended": sorted(group.ended.items()),
        "samples": [[sample.key, sample.rollout, sample.tags] for sample in group.samples.values()],
    }


# -- and back


def load(rows: Iterable[Row], clock: Clock) -> State:
    """Make a state of rows.

    Raises:
        QueueError: ``queue.invalid`` for another format, or where a row is missing.
    """
    found: dict[tuple[str, str, int, int], Any] = {row[:4]: json.loads(row[4]) for row in rows}
    try:
        state = State(clock)
        if (read := found.get(("meta", "format", -1, -1))) != FORMAT:
            raise QueueError("the queue's state has another format", expected=FORMAT, found=read)
        state.committed = found["meta", "committed", -1, -1]
        state.marks = found["meta", "marks", -1, -1]
        for kind, name, _, _ in list(found):
            if kind == "consumer":
                _load_consumer(state, name, found[kind, name, -1, -1])
        for kind, name, _, _ in list(found):
            if kind == "partition":
                _load_partition(state, state.partition(name), found)
        return state
    except (KeyError, TypeError, ValueError) as error:
        raise QueueError("a queue's saved state is not whole", expected="all of its rows", found=error) from error


def _load_consumer(state: State, name: str, saved: Mapping[str, Any]) -> None:
    partition = state.partition(saved["partition"])
    reuse = None if saved["reuse"] is None else Reuse(**saved["reuse"])
    consumer = Consumer(name, partition, tuple(saved["columns"]), tuple(saved["writes"]), reuse=reuse)
    consumer.epoch, consumer.saved_sampler = saved["epoch"], saved["sampler"]
    partition.consumers.append(consumer)
    state.consumers[name] = consumer


def _load_partition(state: State, partition: Partition, found: Mapping[tuple[str, str, int, int], Any]) -> None:
    name = partition.name
    saved = found["partition", name, -1, -1]
    partition.next_batch = saved["next_batch"]
    for number in saved["batches"]:
        head = found["batch", name, number, -1]
        batch = BatchState(partition, number, head["rollouts"], failure=head["failure"])
        partition.batches[number] = batch
        for index in range(head["places"]):
            body = found["body", name, number, index] if "bytes" in found["place", name, number, index] else None
            _load_place(state, batch, index, found["place", name, number, index], body)
        if batch.vacant and batch.failure is None:
            why = "the queue was restored"
            state.record("release", partition=name, batch=number, groups=list(batch.vacant), reason=why)


def _load_place(
    state: State, batch: BatchState, index: int, saved: Mapping[str, Any], body: Mapping[str, Any] | None
) -> None:
    place = Place(batch, index, saved["retry"], saved["reissue"], is_consumed=saved["consumed"])
    place.reasons = list(saved["reasons"])
    batch.places.append(place)
    if place.is_consumed:
        batch.published += 1
    elif body is not None:
        place.explorer = saved["explorer"]
        _load_group(state, place, saved, body)
        batch.published += 1
    else:
        place.reissue += saved["explorer"] is not None
        batch.vacant.append(index)  # in rising order, so a heap


def _load_group(state: State, place: Place, saved: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    group = Group(place.key, place, body["task_id"], body["rollouts"], body["minimum_samples"], body["tags"])
    group.state, group.ended = "published", dict(body["ended"])
    place.group = state.groups[str(group.key)] = group
    masks = [group.partition.mask(names) for names in saved["columns"]]
    masks = masks * len(body["samples"]) if len(masks) == 1 else masks
    for (key, rollout, tags), mask, size in zip(body["samples"], masks, saved["bytes"], strict=True):
        group.samples[key] = Sample(key, rollout, tags, mask, size)
        state.count(1, size)
    for name, (steps, retired) in saved["uses"].items():
        _load_use(state, state.consumers[name], group, Use(list(steps), retired))


def _load_use(state: State, consumer: Consumer, group: Group, use: Use) -> None:
    group.uses[consumer.name] = use
    for step in use.noted():
        if state.committed is None or step > state.committed:
            consumer.pending.setdefault(step, {})[group] = None
