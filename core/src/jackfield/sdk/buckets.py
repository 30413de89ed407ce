"""Tensors as bytes: many of them in one buffer, each at its place, and their digests.

A model may have tens of thousands of small tensors, so these functions count microseconds: a small tensor that lies in
row-major order in host memory is copied as bytes, which takes a third of the time of torch's copy.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import xxhash

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "aligned", "digest", "entry_of", "is_plain", "put", "raw", "view", "views"]

#: A tensor's place in a buffer, as JSON: ``[name, dtype, shape, offset in bytes]``.
Entry: TypeAlias = "list[Any]"

_ALIGNMENT = 64  #: of each tensor in a buffer, in bytes: a cache line, and a multiple of every dtype's size
_SMALL = 1 << 20  #: bytes; torch copies larger tensors with several threads


def aligned(size: int) -> int:
    """Return the next offset at which a tensor may begin, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> Entry:
    """Describe where a tensor is going to lie, from ``offset`` bytes on."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]


def put(buffer: torch.Tensor, entry: Entry, tensor: torch.Tensor) -> None:
    """Copy a tensor, of any stride and device, to its place in a buffer: uint8, ``[bytes]``, contiguous.

    Raises:
        ValueError: there is no room for it at its place.
    """
    size, offset = tensor.nbytes, entry[3]
    if offset + size > buffer.nbytes:
        raise ValueError(f"{entry[0]}: {size} bytes at {offset} do not fit into a buffer of {buffer.nbytes}")
    if not size:
        return
    if size < _SMALL and is_plain(tensor) and buffer.is_cpu:
        ctypes.memmove(buffer.data_ptr() + offset, tensor.data_ptr(), size)
    else:
        view(buffer, entry).copy_(tensor.detach())


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether host memory holds the values as they are, in row-major order."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """Return the tensor that lies at a place in a buffer (uint8, ``[bytes]``), without a copy."""
    import torch

    _, dtype_name, shape, offset = entry
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def views(buffer: torch.Tensor, entries: Sequence[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a buffer with their names, as :func:`view` makes them, in half of the time."""
    whole = buffer[: buffer.numel() // _ALIGNMENT * _ALIGNMENT]
    typed: dict[str, torch.Tensor] = {}
    for entry in entries:
        name, dtype_name, shape, offset = entry
        if dtype_name not in typed:
            import torch

            typed[dtype_name] = whole.view(getattr(torch, dtype_name))
        base = typed[dtype_name]
        strides, count = [], 1
        for length in reversed(shape):
            strides.append(count)
            count *= length
        if count and offset + count * base.itemsize <= whole.numel():
            yield name, base.as_strided(shape, strides[::-1], base.storage_offset() + offset // base.itemsize)
        else:
            yield name, view(buffer, entry)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes in row-major order, uint8 ``[bytes]``, on its device; a copy only where needed."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # a tensor of one element counts as contiguous whatever its stride, which a view of bytes does not take
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def digest(tensor: torch.Tensor) -> str:
    """Compute xxh3_128, in hexadecimal, over dtype name, shape and raw little-endian bytes.

    Any dtype, shape, stride and device; a tensor that is not contiguous or not on the CPU is copied. A digest finds
    errors; it does not withstand forgery.
    """
    plain = tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    state = xxhash.xxh3_128(f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode())
    if size := plain.nbytes:
        # the memory itself: of many small tensors, views of torch and numpy would take longer than hashing
        state.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return state.hexdigest()
