"""The data plane: samples × columns, written by many, leased, acked and consumed exactly once.

**Groups.** The rollouts of a group end with no, one or several samples or fail. With the last of them the group
settles: with enough samples it is published; else it is dropped and its index made again. When a sample of a published
group fails, the same rule decides again. A sample that is gone is no one's error: columns that are added to it and acks
of it are ignored, and its values are deleted.

**Consumers.** A *stage* is registered with the columns that it ``writes``, and is done with a group when they are
there. Any other consumer acks under a lease; once it has leased a group, the group does not change. Leases last until
they are given back or acked, or until their holder ends.

**Backpressure.** Explorers get no further group while ``max_samples`` or ``max_bytes`` would be exceeded. Groups of a
batch that a consumer waits for *now* are given whatever the limits say, and those of the oldest batch that is not
complete, while a consumer waits for any group in vain and no other one has work. So what a trainer waits for can always
be finished: the limits bound how far producers run ahead.
"""

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
    register_sampler,
)
from jackfield.queue.store import effective_acks, read_ledger
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import Values
from jackfield.sdk.columns import (
    column_from_rows,
    dense_column,
    from_nested,
    json_column,
    rows_of,
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
    "column_from_rows",
    "dense_column",
    "effective_acks",
    "from_nested",
    "json_column",
    "read_ledger",
    "register_sampler",
    "rows_of",
    "to_nested",
]
