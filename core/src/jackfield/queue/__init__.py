"""The data plane: a table of samples × columns with many writers and exactly-once consumption.

**Groups.** A rollout of a group ends with no, one or several samples, or it fails. When the last rollout has ended, the
group is published if it has enough samples; otherwise it is dropped and its index is retried. The same rule applies
when a sample of a published group fails. A sample that was removed is not an error: columns added to it and acks of it
are ignored, and its values are deleted.

**Consumers.** A *stage* is registered with the columns that it ``writes``, and is done with a group when these columns
exist. Any other consumer acks under a lease; once it has leased a group, the group does not change. A lease lasts until
it is released or acked, or until its holder ends.

**Backpressure.** Explorers get no further group while ``max_samples`` or ``max_bytes`` would be exceeded. Two kinds of
groups bypass the limits: those of a batch that a consumer is waiting for, and those of the oldest incomplete batch
while a consumer waits for any group and no other consumer has work. So the batch that a trainer waits for can always
be completed; the limits bound how far producers run ahead.
"""

from __future__ import annotations

from jackfield.queue.meta import BatchMeta, Ready, Sampler
from jackfield.queue.store import effective_acks, read_ledger
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.queue.values import Values

__all__ = ["BatchMeta", "Ready", "Sampler", "TransferQueue", "Values", "effective_acks", "read_ledger"]
