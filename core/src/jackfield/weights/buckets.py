"""Many tensors in one buffer of bytes: where each lies, and how it is put in and looked at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch

__all__ = ["Entry", "aligned", "entry_of", "put", "raw", "view"]

#: A tensor's place in a buffer, as JSON: ``[name, dtype, shape, offset in bytes]``.
Entry: TypeAlias = "list[Any]"

_ALIGNMENT = 64  #: of each tensor in a buffer, in bytes: a cache line, and a multiple of every dtype's size


def aligned(size: int) -> int:
    """The next offset at which a tensor may begin, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> Entry:
    """Where a tensor is going to lie."""
    return [name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), offset]


def put(buffer: torch.Tensor, entry: Entry, tensor: torch.Tensor) -> None:
    """Copy a tensor, of any stride and device, to its place.

    Args:
        buffer: uint8, ``[bytes]``.
        entry: of the tensor.
        tensor: what is copied.
    """
    if tensor.numel():
        view(buffer, entry).copy_(tensor.detach())


def view(buffer: torch.Tensor, entry: Entry) -> torch.Tensor:
    """The tensor that lies at its place, without a copy.

    Args:
        buffer: uint8, ``[bytes]``.
        entry: of the tensor.
    """
    import torch

    _, dtype_name, shape, offset = entry
    dtype: torch.dtype = getattr(torch, dtype_name)
    count = 1
    for length in shape:
        count *= length
    if not count:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    return buffer[offset : offset + count * dtype.itemsize].view(dtype).view(shape)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes in row-major order, uint8 ``[bytes]``, on its device; a copy only where they do not lie so."""
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if not plain.numel():
        return torch.empty(0, dtype=torch.uint8, device=plain.device)
    # a tensor of one element counts as contiguous whatever its stride, which a view of bytes does not take
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
