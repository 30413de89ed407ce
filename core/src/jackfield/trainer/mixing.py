"""Groups that a batch has beside its own: used groups again, and groups of other partitions."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import attrs

from jackfield.queue import BatchMeta, Reuse, SamplerSpec, TransferQueue
from jackfield.runtime.samples import TRAIN


@attrs.frozen(kw_only=True)
class Source:
    """Where further groups of a batch are from, how many and which."""

    partition: str  #: the trainer's own: groups that it has trained on before
    ratio: float  #: groups for each group of the batch
    sampler: SamplerSpec
    reuse: Reuse

    async def register(self, queue: TransferQueue, trainer: str, columns: tuple[str, ...]) -> None:
        """Announce the consumer of this source."""
        name = self._consumer(trainer)
        await queue.register_consumer(name, self.partition, columns, sampler=self.sampler, reuse=self.reuse)

    async def sample(self, queue: TransferQueue, trainer: str, step: int, own: int, seconds: float) -> BatchMeta | None:
        """Lease the further groups of a step whose batch has ``own`` groups; None: there are none.

        Raises:
            DeadlineExceeded: another partition did not have as many in time.
        """
        groups = self.groups(step, own)
        if not groups:
            return None
        fresh = self.partition != TRAIN
        name = self._consumer(trainer)
        return await queue.lease_groups(name, groups, step=step, fresh=fresh, deadline_seconds=seconds)

    def groups(self, step: int, own: int) -> int:
        """Count the groups of a step: the ratio holds over all steps, as nearly as whole groups can."""
        each = own * Fraction(str(self.ratio))
        return floor((step + 1) * each) - floor(step * each)

    def _consumer(self, trainer: str) -> str:
        return trainer if self.partition == TRAIN else f"{trainer}/{self.partition}"
