"""The data plane: samples × columns, written by many, leased, acked and consumed exactly once."""

from __future__ import annotations

from jackfield.queue.meta import (
    Batch,
    BatchMeta,
    GroupKey,
    Lease,
    Lineage,
    NewGroup,
    Notice,
    Reuse,
    RolloutReport,
    Written,
)
from jackfield.queue.samplers import (
    SAMPLERS,
    Priority,
    Random,
    Ready,
    Sampler,
    SamplerSpec,
    Sequential,
    make_sampler,
    register_sampler,
)
from jackfield.queue.store import effective_acks, read_ledger
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import Values
from jackfield.sdk.columns import (
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

__all__ = [
    "SAMPLERS",
    "Batch",
    "BatchMeta",
    "GroupKey",
    "Lease",
    "Lineage",
    "NewGroup",
    "Notice",
    "Priority",
    "Random",
    "Ready",
    "Reuse",
    "RolloutReport",
    "Sampler",
    "SamplerSpec",
    "Sequential",
    "TransferQueue",
    "Values",
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
