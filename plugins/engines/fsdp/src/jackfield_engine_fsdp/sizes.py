"""The grid of an engine's ranks: which of them share weights, rows and layers. Importable without torch.

Rank ``(copy, shard, part)`` counts ``part`` fastest, so that a tensor-parallel group is made of neighbours::

    tensor_parallel    ranks that have parts of each layer and the same rows
    sequence_parallel  ranks that have parts of the same rows
    shard_size         ranks over which weights are sharded; beyond them are copies (HSDP)
"""

from __future__ import annotations

import attrs

from jackfield.abc.engine import EngineLayout
from jackfield.errors import EngineError


@attrs.frozen(kw_only=True)
class Sizes:
    """The number of ranks along each dimension."""

    world: int
    shard: int  #: ranks over which the weights of a layer are sharded, beside its tensor-parallel parts
    sequence: int
    tensor: int

    @classmethod
    def of(cls, world: int, *, shard: int | None, reshard: int | None, sequence: int, tensor: int) -> Sizes:
        """Return the sizes for ``world`` ranks, or refuse them with the arithmetic (``config.invalid-value``)."""
        together = f"sequence_parallel {sequence} x tensor_parallel {tensor} = {sequence * tensor}"
        if world % (sequence * tensor):
            raise _refusal(
                f"{world} ranks are no multiple of {together}",
                where="engine.sequence_parallel" if tensor == 1 else "engine.tensor_parallel",
                expected=f"ranks for whole groups: a multiple of {sequence * tensor}",
                found=f"{world} ranks",
            )
        data = world // tensor
        shard = data if shard is None else shard
        if data % shard:
            raise _refusal(
                f"{data} ranks cannot be cut into groups of shard_size {shard}",
                where="engine.shard_size",
                expected=f"a divisor of {data} ({world} ranks / tensor_parallel {tensor})",
                found=shard,
            )
        if reshard is not None and (shard % reshard or reshard >= shard):
            raise _refusal(
                f"weights on {shard} ranks cannot be resharded to {reshard}",
                where="engine.reshard_size",
                expected=f"a divisor of the {shard} ranks that share weights, and less",
                found=reshard,
            )
        return cls(world=world, shard=shard, sequence=sequence, tensor=tensor)

    @property
    def copies(self) -> int:
        """Return how many groups of ranks have all weights."""
        return self.world // (self.shard * self.tensor)

    def layout(self, rank: int) -> EngineLayout:
        """Return the place of a rank: ranks that share rows have one data-parallel rank, and the first gives output."""
        shared = self.sequence * self.tensor
        return EngineLayout(
            data_parallel_rank=rank // shared,
            data_parallel_size=self.world // shared,
            is_output_rank=rank % shared == 0,
        )


def _refusal(message: str, *, where: str, expected: object, found: object) -> EngineError:
    return EngineError(message, code="config.invalid-value", where=where, expected=expected, found=found)
