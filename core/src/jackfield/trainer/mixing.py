"""What a batch has beside the groups of its ticket: used groups once more, groups of other partitions."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import attrs

from jackfield.queue import BatchMeta, Reuse, Sampler, TransferQueue
from jackfield.runtime.samples import TRAIN

__all__ = ["Source"]


@attrs.frozen(kw_only=True)
class Source:
    """Where further groups of a batch are from, how many and which."""

    partition: str  #: the trainer's own: groups that it has trained on before
    ratio: float  #: groups for each group of the ticket
    sampler: Sampler
    reuse: Reuse

    async def register(self, queue: TransferQueue, trainer: str, columns: tuple[str, ...]) -> None:
        """Announce the consumer of this source."""
        name = self._consumer(trainer)
        await queue.register_consumer(name, self.partition, columns, sampler=self.sampler, reuse=self.reuse)

    async def sample(self, queue: TransferQueue, trainer: str, step: int, own: int, seconds: float) -> BatchMeta | None:
        """The groups of a step whose ticket has ``own`` groups; None: none.

        Raises:
            DeadlineExceeded: another partition did not have as many in time.
        """
        groups = self.groups(step, own)
        if not groups:
            return None
        fresh = self.partition != TRAIN
        return await queue.sample_groups(self._consumer(trainer), groups, step, fresh=fresh, deadline_seconds=seconds)

    def groups(self, step: int, own: int) -> int:
        """How many at a step: the ratio holds over all steps, as nearly as whole groups can."""
        each = own * Fraction(str(self.ratio))
        return floor((step + 1) * each) - floor(step * each)

    def _consumer(self, trainer: str) -> str:
        return trainer if self.partition == TRAIN else f"{trainer}/{self.partition}"
