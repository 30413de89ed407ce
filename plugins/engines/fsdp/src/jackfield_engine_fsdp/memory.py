"""Memory of passes: saved activations in the host's memory, and compiled layers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_SMALL = 1024  #: elements of tensors that stay where they are


@contextmanager
def offloading() -> Iterator[None]:
    """Keep what forward passes save for backward passes in the host's memory inside the block.

    Weights stay: FSDP frees and gathers them itself. From an accelerator, copies go through pinned memory, beside the
    computation; on a CPU they are copies in the same memory.
    """

    with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack):
        yield


def _pack(saved: torch.Tensor) -> Any:
    root = saved if saved._base is None else saved._base
    if saved.numel() < _SMALL or isinstance(root, nn.Parameter) or not saved.is_floating_point():
        return saved
    spec = None
    if isinstance(saved, DTensor):
        spec = (saved.device_mesh, saved.placements, saved.shape, saved.stride())
        saved = saved.to_local()
    kept = torch.empty(saved.shape, dtype=saved.dtype, device="cpu", pin_memory=saved.device.type == "cuda")
    kept.copy_(saved, non_blocking=True)
    return saved.device, kept, spec


def _unpack(packed: Any) -> torch.Tensor:
    if isinstance(packed, torch.Tensor):
        return packed
    device, kept, spec = packed
    restored: torch.Tensor = kept.to(device, non_blocking=True)
    if spec is None:
        return restored
    mesh, placements, shape, stride = spec
    return DTensor.from_local(restored, mesh, placements, run_check=False, shape=shape, stride=stride)


def compile_layers(layers: list[nn.Module], backend: str) -> None:
    """Compile each layer in place; the first passes with new shapes compile."""
    for layer in layers:
        layer.compile(backend=backend)
