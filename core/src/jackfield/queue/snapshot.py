"""The controller's state as plain JSON values, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield.queue.controller import Controller
from jackfield.queue.lineage import Lineage, ancestors
from jackfield.queue.reuse import Reuse, Uses
from jackfield.queue.state import Ack, Consumer, Group, Partition, Row, Slot, TicketState

__all__ = ["FORMAT", "load_state", "state_dict"]

#: The version of the format.
FORMAT = 2


def state_dict(controller: Controller) -> dict[str, Any]:
    """Published groups, their rows, acks, and the tickets' counters.

    Leases are not saved: leased rows are available again after loading. Open groups are not saved either: their slots
    are filled again.
    """
    state = controller.state
    return {
        "format": FORMAT,
        "committed": state.committed,
        "consumers": {
            consumer.name: {
                "partition": consumer.partition.name,
                "columns": list(consumer.columns),
                "epoch": consumer.epoch,
                "lease_seconds": consumer.lease_seconds,
                "sampler": consumer.sampler.state_dict(),
                "reuse": None if consumer.reuse is None else attrs.asdict(consumer.reuse),
            }
            for consumer in state.consumers.values()
        },
        "lineage": {
            key: [made.operation, list(made.parents)] for key, made in ancestors(state.rows, state.lineage).items()
        },
        "partitions": {name: _save_partition(partition) for name, partition in state.partitions.items()},
        "discarded": {
            name: sorted({*keys, *(row.key for row in state.rows.values() if _unpublished(row, name))})
            for name, keys in ((name, state.discarded.get(name, [])) for name in state.partitions)
        },
    }


def _unpublished(row: Row, partition: str) -> bool:
    return row.group.partition.name == partition and row.group.state != "published"


def _save_partition(partition: Partition) -> dict[str, Any]:
    return {
        "next_ticket": partition.next_ticket,
        "tickets": [_save_ticket(ticket) for ticket in partition.tickets.values()],
    }


def _save_ticket(ticket: TicketState) -> dict[str, Any]:
    return {
        "number": ticket.number,
        "failure": ticket.failure,
        "slots": [
            {
                "attempt": slot.attempt,
                "claim": slot.claim,
                "explorer": slot.explorer,
                "reasons": slot.reasons,
                "group": None if (group := slot.group) is None or group.state != "published" else _save_group(group),
            }
            for slot in ticket.slots
        ],
    }


def _save_group(group: Group) -> dict[str, Any]:
    partition = group.partition
    return {
        "id": group.id,
        "task_id": group.task_id,
        "runs": group.runs,
        "minimum_rows": group.minimum_rows,
        "tags": dict(group.tags),
        "consumed": group.consumed,
        "ended": [[run, reason] for run, reason in sorted(group.ended.items())],
        "uses": {
            consumer.name: {"steps": uses.steps, "retired": uses.retired}
            for consumer in partition.consumers
            if (uses := consumer.used.get(group)) is not None
        },
        "held_by": sorted(consumer.name for consumer in group.held_by if not _leased(group, consumer)),
        "rows": [
            {
                "key": row.key,
                "run": row.run,
                "sequence": row.sequence,
                "serial": row.serial,
                "tags": dict(row.tags),
                "bytes": row.bytes,
                "columns": list(partition.names(row.columns)),
                "acks": {
                    consumer.name: [ack.step, ack.final]
                    for consumer in partition.consumers
                    if (ack := consumer.acked.get(row)) is not None
                },
            }
            for row in group.rows
        ],
    }


def _leased(group: Group, consumer: Consumer) -> bool:
    """Whether the group is in use for the first time."""
    return any(row in consumer.leased and row not in consumer.acked for row in group.rows)


def load_state(controller: Controller, saved: Mapping[str, Any]) -> None:
    """Replace everything but the registered consumers by what :func:`state_dict` returned.

    Consumers that were registered before keep their columns; saved ones that were not are registered.

    Raises:
        QueueError: ``queue.invalid`` for another format.
    """
    if saved.get("format") != FORMAT:
        raise QueueError("the queue's state has another format", expected=FORMAT, found=saved.get("format"))
    state = controller.state
    registered = [
        (c.name, c.partition.name, c.columns, c.lease_seconds, c.sampler, c.reuse) for c in state.consumers.values()
    ]
    state.partitions.clear()
    state.consumers.clear()
    state.groups.clear()
    state.rows.clear()
    state.row_count = state.byte_count = state.next_serial = 0
    state.committed = saved["committed"]
    state.lineage = {key: Lineage(operation, tuple(parents)) for key, (operation, parents) in saved["lineage"].items()}
    for arguments in registered:
        controller.register_consumer(*arguments)
    for name, fields in saved["consumers"].items():
        if name in state.consumers:
            state.consumers[name].sampler.load_state_dict(fields["sampler"])
        else:
            reuse = None if fields["reuse"] is None else Reuse(**fields["reuse"])
            controller.register_consumer(
                name, fields["partition"], fields["columns"], fields["lease_seconds"], reuse=reuse
            )
        state.consumers[name].epoch = fields["epoch"]
    for name, fields in saved["partitions"].items():
        _load_partition(controller, state.partition(name), fields)
    for consumer in state.consumers.values():
        consumer.ready = dict.fromkeys(sorted(consumer.ready, key=lambda row: row.serial))
    for name, keys in saved["discarded"].items():
        for key in keys:
            state.discard(name, key)


def _load_partition(controller: Controller, partition: Partition, saved: Mapping[str, Any]) -> None:
    partition.next_ticket = saved["next_ticket"]
    for fields in saved["tickets"]:
        ticket = TicketState(partition, fields["number"], failure=fields["failure"])
        partition.tickets[ticket.number] = ticket
        again = []
        for index, place in enumerate(fields["slots"]):
            slot = Slot(ticket, index, place["attempt"], place["claim"])
            slot.reasons = list(place["reasons"])
            ticket.slots.append(slot)
            if place["group"] is not None:
                slot.explorer = place["explorer"]
                _load_group(controller, slot, place["group"])
            else:
                slot.claim += place["explorer"] is not None
                again.append(index)
                ticket.vacant.append(index)  # in rising order, so a heap
        if ticket.failure is None and not ticket.final():
            partition.offer(ticket.number)  # whoever had it is gone; a complete one may still lose a group
        if again and ticket.failure is None:
            controller.state.record(
                "release", partition=partition.name, ticket=ticket.number, slots=again, reason="the queue was restored"
            )


def _load_group(controller: Controller, slot: Slot, saved: Mapping[str, Any]) -> None:
    state, ticket = controller.state, slot.ticket
    group = Group(
        saved["id"], slot, slot.attempt, saved["task_id"], saved["runs"], saved["minimum_rows"], saved["tags"]
    )
    group.consumed = saved["consumed"]
    group.ended = dict(saved["ended"])
    slot.group = group
    state.groups[group.id] = group
    ticket.groups.append(group.id)
    ticket.published += 1
    for name in saved["held_by"]:
        consumer = state.consumers[name]
        group.held_by.add(consumer)
        ticket.held[consumer] = ticket.held.get(consumer, 0) + 1
    for name, uses in saved["uses"].items():
        state.consumers[name].used[group] = Uses(list(uses["steps"]), uses["retired"])
    for fields in saved["rows"]:
        _load_row(controller, group, fields)
    group.state = "published"  # now that all rows are there: no consumer sees a part
    controller.leases.group_published(group)


def _load_row(controller: Controller, group: Group, saved: Mapping[str, Any]) -> None:
    state, partition = controller.state, group.partition
    row = Row(saved["key"], group, saved["run"], saved["sequence"], saved["serial"], saved["tags"])
    row.bytes = saved["bytes"]
    row.columns = partition.mask(tuple(saved["columns"]))
    state.rows[row.key] = row
    state.next_serial = max(state.next_serial, row.serial + 1)
    state.row_count += 1
    state.byte_count += row.bytes
    group.rows.append(row)
    group.slot.ticket.rows += 1
    for name, (step, final) in saved["acks"].items():
        consumer = state.consumers[name]
        consumer.acked[row] = Ack(step, final)
        uses = consumer.used.get(group)
        for each in [step] if uses is None else uses.noted():
            if each is not None and (state.committed is None or each > state.committed):
                consumer.provisional.setdefault(each, {})[row] = None
        if final:
            controller.leases.finish(consumer, row)
    controller.leases.row_changed(row, -1, set())
