"""The process groups of an engine's ranks."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import Any

import attrs
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from jackfield_engine_fsdp.sizes import Sizes


@attrs.frozen(eq=False)
class Mesh:
    """The process groups for :class:`Sizes`; making one is a collective operation."""

    sizes: Sizes
    layers: DeviceMesh  #: over which a layer's parameters are sharded: ``[shard]`` or ``[replicate, shard]``
    rest: DeviceMesh  #: the same for all other parameters, which have no tensor-parallel parts
    tensor: DeviceMesh | None
    sequence: DeviceMesh | None

    @classmethod
    def make(cls, sizes: Sizes, device: torch.device, timeout: timedelta) -> Mesh:
        """Create the groups of this rank, with ``timeout`` for their operations."""
        tensor, rest = None, {"replicate": sizes.copies, "shard": sizes.shard * sizes.tensor}
        layers = whole = _grid(device, rest, timeout)
        if sizes.tensor > 1:
            grid = {"replicate": sizes.copies, "shard": sizes.shard, "tensor": sizes.tensor}
            every = _grid(device, grid, timeout, keep=("shard", "tensor"))
            tensor = every["tensor"]
            layers = every["replicate", "shard"] if sizes.copies > 1 else every["shard"]
        sequence = None
        if sizes.sequence > 1:
            rows = sizes.world // (sizes.sequence * sizes.tensor)
            grid = {"rows": rows, "sequence": sizes.sequence, "tensor": sizes.tensor}
            sequence = _grid(device, grid, timeout, keep=("sequence",))["sequence"]
        return cls(sizes, layers, whole, tensor, sequence)


def _grid(device: torch.device, grid: dict[str, int], timeout: timedelta, keep: tuple[str, ...] = ("shard",)) -> Any:
    """Return a mesh of the dimensions that are larger than 1, and those to ``keep``."""
    kept = {name: size for name, size in grid.items() if size > 1 or name in keep}
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    for group in mesh.get_all_groups():
        _set_pg_timeout(timeout, group)
    return mesh


def norm_share(tensor: torch.Tensor, world: int) -> float:
    """Return the factor of a local part's square in a sum over all ranks: 1, or less where ranks have the same part."""
    if not isinstance(tensor, DTensor):
        return 1.0 / world
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate()) / world


def is_first_copy(tensor: DTensor) -> bool:
    """Return whether this rank is the first along the mesh dimensions that hold copies."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None, "every rank is in its meshes"
    places = zip(coordinate, tensor.placements, strict=True)
    return not any(index for index, placement in places if placement.is_replicate())
