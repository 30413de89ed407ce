"""The data plane: samples × columns, written by many, leased, acked and consumed exactly once."""

from __future__ import annotations

from jackfield.queue.columns import (
    byte_size,
    column_from_rows,
    concatenate,
    dense_column,
    from_nested,
    json_column,
    row_bytes,
    rows_of,
    take,
    to_nested,
)
from jackfield.queue.ledger import Ledger, effective_acks, read_ledger
from jackfield.queue.lineage import Lineage
from jackfield.queue.local import LocalQueue
from jackfield.queue.meta import BatchMeta, Claim, GroupSlot, GroupView, Notice, Ticket
from jackfield.queue.reuse import Reuse
from jackfield.queue.rows import Rows, Written
from jackfield.queue.samplers import (
    SAMPLERS,
    Priority,
    Random,
    Ready,
    Sampler,
    Sequential,
    make_sampler,
    register_sampler,
)
from jackfield.queue.transfer_queue import TransferQueue

__all__ = [
    "SAMPLERS",
    "BatchMeta",
    "Claim",
    "GroupSlot",
    "GroupView",
    "Ledger",
    "Lineage",
    "LocalQueue",
    "Notice",
    "Priority",
    "Random",
    "Ready",
    "Reuse",
    "Rows",
    "Sampler",
    "Sequential",
    "Ticket",
    "TransferQueue",
    "Written",
    "byte_size",
    "column_from_rows",
    "concatenate",
    "dense_column",
    "effective_acks",
    "from_nested",
    "json_column",
    "make_sampler",
    "read_ledger",
    "register_sampler",
    "row_bytes",
    "rows_of",
    "take",
    "to_nested",
]
