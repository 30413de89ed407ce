"""What a wait of a consumer or an explorer lacks, in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jackfield.queue.records import BatchState, Consumer, Group

_SHOWN = 4  #: samples or groups that a message names


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
        f"{group.name} (task {group.task_id!r}, rollouts {', '.join(map(str, group.running()))})"
        for group in groups
        if not group.is_published
    ]
