"""The controller's state as plain JSON values, and back."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jackfield.errors import QueueError
from jackfield.queue.controller import Controller
from jackfield.queue.lineage import Lineage, ancestors
from jackfield.queue.records import Ack, Group, Partition, Row, Slot, TicketState
from jackfield.queue.reuse import Reuse, Uses
from jackfield.queue.saving import save_consumer, save_partition

__all__ = ["FORMAT", "load_state", "state_dict"]

#: The version of the format.
FORMAT = 5


def state_dict(controller: Controller, again_from: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Published groups, their rows, acks, and the tickets' counters.

    Leases are not saved: leased rows are available again after loading. Open groups are not saved either: their slots
    are filled again. ``again_from`` names, by partition, the first ticket that is not saved at all.
    """
    state, again_from = controller.state, again_from or {}
    unpublished: dict[str, list[str]] = {}
    for key, partition_name in state.in_flight.items():
        unpublished.setdefault(partition_name, []).append(key)
    for row in state.rows.values():
        partition, number = row.group.partition.name, row.group.slot.ticket.number
        if row.group.state != "published" or number >= again_from.get(partition, number + 1):
            unpublished.setdefault(row.group.partition.name, []).append(row.key)
    return {
        "format": FORMAT,
        "committed": state.committed,
        "consumers": {consumer.name: save_consumer(consumer) for consumer in state.consumers.values()},
        "lineage": {
            key: [made.operation, list(made.parents)] for key, made in ancestors(state.rows, state.lineage).items()
        },
        "partitions": {
            name: save_partition(partition, again_from.get(name, partition.next_ticket))
            for name, partition in state.partitions.items()
        },
        "discarded": {
            name: sorted({*state.discarded.get(name, []), *unpublished.get(name, [])}) for name in state.partitions
        },
    }


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
            seconds = math.inf if fields["lease_seconds"] is None else fields["lease_seconds"]
            controller.register_consumer(name, fields["partition"], fields["columns"], seconds, reuse=reuse)
        state.consumers[name].epoch = fields["epoch"]
    for name, fields in saved["partitions"].items():
        _load_partition(controller, state.partition(name), fields)
    controller.offer_unfinished()
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
