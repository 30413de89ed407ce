"""Packing of many tensors into one byte buffer, and digests of tensors.

A model may have tens of thousands of small tensors, so microseconds matter: a small tensor that is in row-major order
in host memory is copied as bytes, which takes a third of the time of torch's copy. What follows from names, dtypes and
shapes is computed once for a model, not once for a weight version.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import xxhash

if TYPE_CHECKING:
    import torch

#: The description of a tensor in a buffer, as JSON: ``[name, dtype, shape, offset in bytes]``.
Entry: TypeAlias = "list[Any]"

_ALIGNMENT = 64  #: bytes, for each tensor in a buffer: a cache line, and a multiple of every dtype's size
_SMALL = 1 << 20  #: bytes; torch copies larger tensors with several threads


class _Entries(list[Entry]):
    """The entries of a bucket."""

    kept: tuple[int, list[tuple[str, torch.Tensor]]] = (0, [])  #: address of a buffer, and views of it

    @cached_property
    def plan(self) -> list[tuple[str, torch.dtype, list[int], list[int], int, int, int]]:
        """Name, dtype, shape, strides, offset in elements, offset and size in bytes of each tensor."""
        import torch

        found = []
        for name, dtype_name, shape, offset in self:
            dtype = getattr(torch, dtype_name)
            strides = list(itertools.accumulate(shape[:0:-1], operator.mul, initial=1))[::-1] if shape else []
            start, size = offset // dtype.itemsize, math.prod(shape) * dtype.itemsize
            found.append((name, dtype, shape, strides, start, offset, size))
        return found


@attrs.define(eq=False)
class Layout:
    """The entries of all buckets of a transfer, which both ends keep for the next one.

    A bucket is described to the workers only if it differs from the one at its place in the last complete transfer, or
    if a worker did not take part in that one.
    """

    name: str = ""  #: given by the sender; ends whose layouts have the same name have the same layout; empty: none
    _kept: list[_Entries] = attrs.field(factory=list, init=False)  #: of the last complete transfer
    _made: list[_Entries] = attrs.field(factory=list, init=False)
    _shared: bool = attrs.field(default=False, init=False)  #: whether every worker has the kept one
    _same: bool = attrs.field(default=True, init=False)  #: whether all buckets are as they were

    def begin(self, shared: bool) -> None:
        """Begin a transfer."""
        self._made, self._shared, self._same = [], shared, True

    def announced(self, entries: Sequence[Entry]) -> Sequence[Entry] | None:
        """Return the entries of the sender's next bucket, or None if the workers know them."""
        place = len(self._made)
        same = place < len(self._kept) and self._kept[place] == entries
        self._made.append(self._kept[place] if same else _Entries(entries))
        self._same &= same
        return None if same and self._shared else entries

    def learned(self, entries: Sequence[Entry] | None) -> _Entries:
        """Return the entries of a worker's next bucket, of which the sender has announced these."""
        self._made.append(self._kept[len(self._made)] if entries is None else _Entries(entries))
        return self._made[-1]

    def end(self, name: str = "") -> str:
        """Keep the layout of a complete transfer under the sender's name, which is returned; a sender chooses it."""
        changed = not self._same or len(self._made) != len(self._kept)
        self.name = name or (secrets.token_hex(8) if changed else self.name)
        self._kept, self._made = self._made, []
        return self.name


@attrs.define(eq=False)
class Bucket:
    """Tensors that a worker receives together."""

    number: int  #: count of the transfer's buckets up to this one
    entries: Sequence[Entry]
    place: Any  #: where its bytes are, as the checkpoint engine describes it

    def tensors(self, content: torch.Tensor, buffers: Iterable[torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
        """Return names and views of its tensors, made once if ``content`` is a kept one of ``buffers`` on the host."""
        entries, address = self.entries, content.data_ptr()
        kept = content.is_cpu and any(address == buffer.data_ptr() for buffer in buffers)
        if not kept or not isinstance(entries, _Entries):
            return views(content, entries)
        if entries.kept[0] != address:
            entries.kept = address, list(views(content, entries))
        return entries.kept[1]


def aligned(size: int) -> int:
    """Return the next offset at which a tensor may begin, in bytes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def entry_of(name: str, tensor: torch.Tensor, offset: int = 0) -> Entry:
    """Return the entry of a tensor that will be put at ``offset``, in bytes."""
    return [name, _name_of(tensor.dtype), list(tensor.shape), offset]


@cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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


@attrs.define(eq=False)
class Packer:
    """A bucket that is filled, tensor by tensor."""

    buffer: torch.Tensor | None = None  #: uint8 ``[bytes]``
    entries: list[Entry] = attrs.field(factory=list, init=False)
    size: int = attrs.field(default=0, init=False)  #: bytes that are filled

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor behind the others."""
        assert self.buffer is not None, "there is a buffer"
        put(self.buffer, entry := entry_of(name, tensor, self.size), tensor)
        self.entries.append(entry)
        self.size = aligned(self.size + tensor.nbytes)

    def add_small(self, name: str, tensor: torch.Tensor, limit: int) -> bool:
        """Add a tensor if it is small and a bucket of ``limit`` bytes has room. It is quick: a model has thousands."""
        size = tensor.nbytes
        fits = self.buffer is not None and size < _SMALL and self.size + size <= limit
        if fits:
            self.add(name, tensor)
        return fits


def views(buffer: torch.Tensor, entries: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and views of tensors in a buffer (uint8, ``[bytes]``)."""
    plan = (entries if isinstance(entries, _Entries) else _Entries(entries)).plan
    whole = buffer[: buffer.numel() // _ALIGNMENT * _ALIGNMENT]
    end = whole.numel()
    typed: dict[torch.dtype, tuple[torch.Tensor, Any]] = {}  # one view per dtype takes half the time of one per tensor
    for name, dtype, shape, strides, start, offset, size in plan:
        if dtype not in typed:
            view = whole.view(dtype)
            typed[dtype] = view, view.storage_offset()
        base, first = typed[dtype]
        if not size:
            yield name, base.new_empty(shape)
        elif offset + size <= end:
            yield name, base.as_strided(shape, strides, first + start)
        else:
            yield name, buffer[offset : offset + size].view(dtype).view(shape)


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
    state = _begun(plain.dtype, plain.shape).copy()
    if size := plain.nbytes:
        # hash the memory directly: for many small tensors, views of torch and numpy take longer than hashing
        state.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return state.hexdigest()


@lru_cache(maxsize=1024)
def _begun(dtype: torch.dtype, shape: torch.Size) -> xxhash.xxh3_128:
    """Return the state of a digest that has read a tensor's dtype and shape."""
    return xxhash.xxh3_128(f"{_name_of(dtype)}{list(shape)}".encode())
