"""What a consumer waits for, in words: the columns that rows lack, the runs that have not ended."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jackfield.queue.records import Consumer, Group, Row
from jackfield.queue.state import State

__all__ = ["missing_groups", "missing_rows", "missing_sample", "some"]

_SHOWN = 4  #: rows or groups that a message names


def missing_rows(state: State, consumer: Consumer) -> str:
    """Why a consumer gets no row at all."""
    partition = consumer.partition
    parts = [f"any row of partition {partition.name!r} for consumer {consumer.name!r}", *_in_partition(state, consumer)]
    if consumer.leased:
        parts.append(f"{len(consumer.leased)} rows are leased")
    if consumer.ready:
        parts.append(f"{len(consumer.ready)} rows are ready, and the sampler chose none")
    return "; ".join(parts)


def missing_sample(state: State, consumer: Consumer, groups: int, ready: int) -> str:
    """Why a consumer does not get so many groups."""
    head = f"{groups} groups of partition {consumer.partition.name!r} for consumer {consumer.name!r}, {ready} are ready"
    parts = [head, *_in_partition(state, consumer)]
    spent = sum(not uses.may_be_used_again(consumer.reuse) for uses in consumer.used.values())
    if spent:
        parts.append(f"{spent} have been used as often as they may")
    return "; ".join(parts)


def missing_groups(consumer: Consumer, number: int) -> str:
    """Why a consumer does not get the groups of a ticket."""
    partition = consumer.partition
    head = f"ticket {number} of partition {partition.name!r} for consumer {consumer.name!r}"
    ticket = partition.tickets.get(number)
    if ticket is None:
        return f"{head}; no explorer has claimed it"
    ready = ticket.ready.get(consumer, {})
    parts = [f"{head}, {ticket.published} of whose {len(ticket.slots)} groups are published and {len(ready)} ready"]
    if number in partition.offered:
        parts.append("it waits to be claimed again")
    empty = [str(slot.index) for slot in ticket.slots if slot.group is None]
    if empty:
        parts.append(f"slots without a group: {some(empty)}")
    groups = [slot.group for slot in ticket.slots if slot.group is not None]
    rows = [row for group in groups if group.state == "published" for row in group.rows]
    parts += _unfinished(consumer, groups, rows)
    alone = [row.key for row in rows if row in consumer.leased and not consumer.leased[row].whole]
    alone += [f"{group.consumed} of {group.id}" for group in groups if group.consumed and not group.held_by]
    if alone:
        parts.append(f"rows leased one by one: {some(alone)}")
    return "; ".join(parts)


def some(names: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")


def _in_partition(state: State, consumer: Consumer) -> list[str]:
    partition = consumer.partition
    groups = [group for group in state.groups.values() if group.partition is partition]
    rows = [row for row in state.rows.values() if row.group.partition is partition]
    return _unfinished(consumer, groups, rows)


def _unfinished(consumer: Consumer, groups: Iterable[Group], rows: Iterable[Row]) -> list[str]:
    parts = []
    lacking = [_lacks(row, consumer) for row in rows if consumer.mask & ~row.columns]
    if lacking:
        parts.append(f"{len(lacking)} rows lack columns: {some(lacking)}")
    ends = [end for group in groups if (end := _unended(group))]
    if ends:
        parts.append(f"runs have not ended: {some(ends)}")
    return parts


def _lacks(row: Row, consumer: Consumer) -> str:
    return f"{row.key} ({', '.join(consumer.partition.names(consumer.mask & ~row.columns))})"


def _unended(group: Group) -> str:
    if group.state != "open":
        return ""
    runs = [str(run) for run in range(group.runs) if run not in group.ended]
    return f"{group.id} (task {group.task_id!r}, runs {', '.join(runs)})"
