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
    ready = len(batch.ready.get(consumer, ()))
    parts = [f"{head}, {batch.published} of whose {len(batch.places)} groups are published and {ready} ready"]
    if number in partition.offered:
        parts.append("it waits to be claimed again")
    empty = [str(place.index) for place in batch.places if place.group is None and not place.is_consumed]
    if empty:
        parts.append(f"indexes without a group: {some(empty)}")
    return "; ".join([*parts, *_lacking(consumer, (place.group for place in batch.places if place.group))])


def missing_groups(consumer: Consumer, count: int, ready: int) -> str:
    """Say why a consumer does not get so many groups."""
    name = consumer.partition.name
    parts = [f"{count} groups of partition {name!r} for consumer {consumer.name!r}, {ready} are ready"]
    groups = list(consumer.partition.groups())
    parts += _lacking(consumer, groups)
    spent = sum(consumer.name in group.uses and group.uses[consumer.name].is_spent(consumer.reuse) for group in groups)
    if spent:
        parts.append(f"{spent} have been used as often as they may")
    if consumer.leases:
        parts.append(f"{sum(map(len, consumer.leases.values()))} are leased")
    return "; ".join(parts)


def unfinished(batch: BatchState) -> str:
    """Say what keeps a batch from being final."""
    head = f"batch {batch.number} of partition {batch.partition.name!r}"
    empty = [str(place.index) for place in batch.places if place.group is None and not place.is_consumed]
    groups = [place.group for place in batch.places if place.group is not None]
    running = [_running(group) for group in groups if group.state == "open"]
    if empty:
        return f"{head}: no group was opened at the indexes {some(empty)}"
    if running:
        return f"{head}: groups that have not ended: {some(running)}"
    free = [str(group.key) for group in groups if not group.is_fixed()]
    if free:
        return f"{head}: published groups that no consumer has leased: {some(free)}"
    names = {name for group in groups if not group.is_acked() for name in group.uses}
    return f"{head}: consumers that have leased groups and not acked them: {', '.join(sorted(names))}"


def some(names: Sequence[str]) -> str:
    """Return the first few, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _lacking(consumer: Consumer, groups: Iterable[Group]) -> list[str]:
    groups, parts = list(groups), []
    samples = [sample for group in groups for sample in group.samples.values()]
    columns = [(sample.key, consumer.partition.names(consumer.needs & ~sample.columns)) for sample in samples]
    lacking = [f"{key} ({', '.join(names)})" for key, names in columns if names]
    if lacking:
        parts.append(f"{len(lacking)} samples lack columns: {some(lacking)}")
    running = [_running(group) for group in groups if group.state == "open"]
    if running:
        parts.append(f"rollouts have not ended: {some(running)}")
    return parts


def _running(group: Group) -> str:
    return f"{group.key} (task {group.task_id!r}, rollouts {', '.join(map(str, group.running()))})"
