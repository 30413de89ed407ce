"""Parts of the controller's state as plain JSON values: what checkpoints and the journal have in common."""

from __future__ import annotations

import math
from typing import Any

import attrs

from jackfield.queue.records import Consumer, Group, Partition, Slot, TicketState

__all__ = ["save_consumer", "save_partition", "save_slot"]


def save_consumer(consumer: Consumer) -> dict[str, Any]:
    """What it is registered for; not its leases."""
    return {
        "partition": consumer.partition.name,
        "columns": list(consumer.columns),
        "epoch": consumer.epoch,
        "lease_seconds": None if consumer.lease_seconds == math.inf else consumer.lease_seconds,
        "sampler": consumer.sampler.state_dict(),
        "reuse": None if consumer.reuse is None else attrs.asdict(consumer.reuse),
    }


def save_partition(partition: Partition, below: int) -> dict[str, Any]:
    """Its tickets below a number, those that are not consumed."""
    return {
        "next_ticket": min(below, partition.next_ticket),
        "tickets": [_save_ticket(ticket) for ticket in partition.tickets.values() if ticket.number < below],
    }


def _save_ticket(ticket: TicketState) -> dict[str, Any]:
    return {
        "number": ticket.number,
        "failure": ticket.failure,
        "slots": [save_slot(slot) for slot in ticket.slots],
    }


def save_slot(slot: Slot) -> dict[str, Any]:
    """A place of a ticket, with its group where that is published."""
    group = slot.group
    return {
        "attempt": slot.attempt,
        "claim": slot.claim,
        "explorer": slot.explorer,
        "reasons": slot.reasons,
        "group": None if group is None or group.state != "published" else _save_group(group),
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
    """Whether the group is in use, as a whole, for the first time."""
    leases = [consumer.leased.get(row) for row in group.rows if row not in consumer.acked]
    return any(lease is not None and lease.whole for lease in leases)
