"""Whole tensors and this rank's parts of them, with VeOmni's slices of experts."""

from __future__ import annotations

import attrs
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from veomni.distributed.parallel_state import ParallelState


@attrs.frozen(eq=False)
class Part:
    """This rank's part of a tensor."""

    values: torch.Tensor  #: shares the tensor's memory
    shape: tuple[int, ...]  #: of the whole
    start: tuple[int, ...]  #: the part's first element in the whole
    first: bool  #: no rank before this one has the same part


class Sharding:
    """How the parameters of a model are split: by FSDP, and those of experts along their first dimension before.

    ``experts`` are names of parameters that expert parallelism slices; the slices are in the order of the ranks.
    """

    def __init__(self, state: ParallelState, experts: frozenset[str]) -> None:
        self.state, self.experts = state, experts

    def full(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole of a tensor, detached, in its own memory. A collective operation."""
        tensor = tensor.detach()
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        if name not in self.experts:
            own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            shares = whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr()
            return whole.clone() if shares else whole  # with one rank there is nothing to gather
        slices = [torch.empty_like(whole) for _ in range(self.state.ep_size)]
        dist.all_gather(slices, whole.contiguous(), group=self.state.ep_group)
        return torch.cat(slices)

    def part(self, name: str, tensor: torch.Tensor) -> Part:
        """Return this rank's part. No collective operation."""
        if not isinstance(tensor, DTensor):
            first = not dist.is_initialized() or dist.get_rank() == 0
            return Part(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), first)
        mesh, placements = tensor.device_mesh, tensor.placements
        _, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
        shape, start = list(tensor.shape), list(offsets)
        first = all(
            placement.is_shard() or mesh.get_local_rank(dimension) == 0
            for dimension, placement in enumerate(placements)
        )
        if name in self.experts:
            start[0] += self.state.ep_rank * shape[0]
            shape[0] *= self.state.ep_size
        return Part(tensor.to_local().detach(), tuple(shape), tuple(start), first)
