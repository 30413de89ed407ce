"""Packing of many tensors into one byte buffer, and digests of tensors.

A model may have tens of thousands of small tensors, so microseconds matter: a small tensor that is in row-major order
in host memory is copied as bytes, which takes a third of the time of torch's copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import xxhash

if TYPE_CHECKING:
    import torch

#: The description of a tensor in a buffer, as JSON: ``[name, dtype, shape, offset in bytes]``.
Entry: TypeAlias = "list[Any]"

_ALIGNMENT = 64  #: bytes, for each tensor in a buffer: a cache line, and a multiple of every dtype's size
_SMALL = 1 << 20  #: bytes; torch copies larger tensors with several threads


@attrs.define(eq=False)
class Bucket:
    """Tensors that a worker receives together."""

    number: int  #: count of the transfer's buckets up to this one
    entries: Sequence[Entry]
    place: Any  #: where its bytes are, as the checkpoint engine describes it


def aligned(size: int) -> int:
    """Return the next offset at which a tensor may begin, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> Entry:
    """Return the entry of a tensor that will be put at ``offset``, in bytes."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]


def kept_buffer(buffers: list[torch.Tensor], slot: int, size: int, device: str) -> torch.Tensor:
    """Return the buffer of a slot, uint8 of at least ``size`` bytes; it is kept, as touching fresh memory is slow."""
    import torch

    while len(buffers) <= slot:
        buffers.append(torch.empty(0, dtype=torch.uint8))
    if buffers[slot].numel() < size or buffers[slot].device.type != torch.device(device).type:
        buffers[slot] = torch.empty(size, dtype=torch.uint8, device=device)
    return buffers[slot]


def put(buffer: torch.Tensor, entry: Entry, tensor: torch.Tensor) -> None:
    """Copy a tensor of any stride and device into a buffer (uint8, ``[bytes]``); ``ValueError`` if it does not fit."""
    size, offset = tensor.nbytes, entry[3]
    if offset + size > buffer.nbytes:
        raise ValueError(f"{entry[0]}: {size} bytes at {offset} do not fit into a buffer of {buffer.nbytes}")
    if not size:
        return
    if size < _SMALL and is_plain(tensor) and buffer.is_cpu:
        ctypes.memmove(buffer.data_ptr() + offset, tensor.data_ptr(), size)
    else:
        next(views(buffer, [entry]))[1].copy_(tensor.detach())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the values are in host memory, unmodified and in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def views(buffer: torch.Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and views of tensors in a buffer (uint8, ``[bytes]``)."""
    import torch

    whole = buffer[: buffer.numel() // _ALIGNMENT * _ALIGNMENT]
    typed: dict[str, torch.Tensor] = {}  # one view per dtype takes half of the time of one per tensor
    for name, dtype_name, shape, offset in entries:
        if dtype_name not in typed:
            typed[dtype_name] = whole.view(getattr(torch, dtype_name))
        base, count = typed[dtype_name], math.prod(shape)
        size, strides = count * base.itemsize, [1]
        for length in shape[:0:-1]:
            strides.append(strides[-1] * length)
        if not count:
            yield name, base.new_empty(shape)
        elif offset + size <= whole.numel():
            strides = strides[::-1] if shape else []
            yield name, base.as_strided(shape, strides, base.storage_offset() + offset // base.itemsize)
        else:
            yield name, buffer[offset : offset + size].view(base.dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, uint8 ``[bytes]``, on its device; copy only if needed."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # a tensor of one element counts as contiguous with any stride, but a view of bytes does not accept every stride
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Compute xxh3_128, in hexadecimal, over dtype name, shape and raw little-endian bytes.

    Any dtype, shape, stride and device is allowed; a tensor that is not contiguous or not on the CPU is copied. The
    digest detects errors; it is not cryptographic.
    """
    plain = tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    state = xxhash.xxh3_128(f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode())
    if size := plain.nbytes:
        # hash the memory directly: for many small tensors, views of torch and numpy take longer than hashing
        state.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return state.hexdigest()
