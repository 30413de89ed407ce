"""Deltas: of each tensor the blocks of bytes that have changed since a version that every worker holds.

The sender remembers a digest of each block of what it has sent. What differs travels as a tensor like any other, so
every checkpoint engine that moves tensors moves deltas: uint8, under the changed tensor's name behind :data:`PREFIX`,

    int64 block_bytes | int64 count | int64 index of each changed block | the blocks, one after the other

little-endian; the last block of a tensor may be short. A tensor of which every block has changed, or that is new,
travels whole, under its own name. Digests of the whole tensors, taken at both ends, prove the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import attrs
import xxhash

from jackfield.errors import WeightsError
from jackfield.weights.buckets import raw
from jackfield.weights.digest import digest

if TYPE_CHECKING:
    import torch

__all__ = ["PREFIX", "Blocks", "HeldWeights", "SentVersions", "check_base"]

PREFIX = "delta:"  #: of the name of changed blocks
_WORD = 8  #: bytes of a number in front of the blocks
_VERSIONS = 2  #: that a sender remembers: the one that everybody holds, and the one that is on its way


# -- the sender --------------------------------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Blocks:
    """Digests of a tensor's blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digests: torch.Tensor  #: xxh3_64 of each, int64 ``[blocks]``

    @classmethod
    def of(cls, tensor: torch.Tensor, block_bytes: int) -> Blocks:
        """Of a tensor of any dtype, shape, stride and device."""
        import torch

        content = raw(tensor).cpu()
        size, found = content.numel(), []
        if size:
            memory = memoryview((ctypes.c_char * size).from_address(content.data_ptr())).cast("B")
            found = [
                xxhash.xxh3_64_digest(memory[start : start + block_bytes]) for start in range(0, size, block_bytes)
            ]
        joined = bytearray(b"".join(found))
        digests = torch.frombuffer(joined, dtype=torch.int64) if joined else torch.empty(0, dtype=torch.int64)
        return cls(tensor.dtype, tuple(tensor.shape), digests)

    def changed(self, other: Blocks) -> torch.Tensor | None:
        """The indexes of blocks that differ from those of ``other``, int64; None: they have nothing in common."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return None
        return (self.digests != other.digests).nonzero().flatten()


class SentVersions:
    """What a sender remembers of the last versions that it has sent."""

    def __init__(self, block_bytes: int) -> None:
        """
        Args:
            block_bytes: of a block; 8 bytes are remembered for each.
        """
        self._block_bytes = block_bytes
        self._versions: dict[int, dict[str, Blocks]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def blocks(self, tensor: torch.Tensor) -> Blocks:
        """Of a tensor that is being sent."""
        return Blocks.of(tensor, self._block_bytes)

    def remember(self, version: int, blocks: dict[str, Blocks]) -> None:
        """A version has been sent, whole or as a delta."""
        self._versions.pop(version, None)
        self._versions[version] = blocks
        while len(self._versions) > _VERSIONS:
            del self._versions[next(iter(self._versions))]

    def change(self, name: str, tensor: torch.Tensor, blocks: Blocks, base: int) -> tuple[str, torch.Tensor] | None:
        """What has to be sent of a tensor to those who hold version ``base``; None: nothing."""
        before = self._versions[base].get(name)
        changed = None if before is None else blocks.changed(before)
        if changed is None or (len(changed) == len(blocks.digests) > 0):
            return name, tensor
        if not len(changed):
            return None
        return PREFIX + name, _packed(raw(tensor).cpu(), changed, self._block_bytes)


def _packed(content: torch.Tensor, changed: torch.Tensor, block_bytes: int) -> torch.Tensor:
    import torch

    numbers = torch.cat((torch.tensor([block_bytes, len(changed)]), changed))
    whole = content.numel() // block_bytes
    blocks = content[: whole * block_bytes].view(whole, block_bytes)
    inner = changed[changed < whole]
    parts = [numbers.view(torch.uint8), blocks[inner].flatten()]
    if len(inner) < len(changed):
        parts.append(content[whole * block_bytes :])
    return torch.cat(parts)


def check_base(held: int | None, base: int | None) -> None:
    """Refuse a delta to another version than the one that is held.

    Raises:
        WeightsError: ``weights.base``.
    """
    if base is None or held != base:
        raise WeightsError(
            "a delta came to weights that are not held",
            code="weights.base",
            expected="no delta" if held is None else f"a delta to version {held}",
            found=f"a delta to version {base}",
            fix="send a full update; weights.on_missing_base: full does so by itself",
        )


# -- a worker ----------------------------------------------------------------------------------------------------------


class HeldWeights:
    """What a worker holds of the last version that it received, byte for byte as it was sent: what a delta changes.

    A tensor whose parameter has just these bytes is changed there, in place. Of any other (cast, sharded, quantised)
    a copy is kept in host memory.
    """

    def __init__(self, find: Callable[[str], torch.Tensor | None] = lambda _: None) -> None:
        """
        Args:
            find: the loaded parameter, or the part of one, that holds a tensor's bytes as they were sent; None: none.
        """
        self._find = find
        self._copies: dict[str, torch.Tensor] = {}
        self._held: dict[str, None] = {}  #: names
        self.version: int | None = None  #: that is held, whole; None: a delta cannot be loaded

    def forget(self) -> None:
        """What is loaded is not what was sent any more."""
        self.version = None
        self._copies.clear()
        self._held.clear()

    def check(self, base: int | None) -> None:
        """Refuse a delta to another version than the one that is held; changes nothing.

        Raises:
            WeightsError: ``weights.base``.
        """
        check_base(self.version, base)

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor has been loaded as it was sent."""
        self._held[name] = None
        found = self._place(name)
        if found is not None and found.dtype == tensor.dtype and found.shape == tensor.shape:
            self._copies.pop(name, None)
        else:
            self._copies[name] = tensor.detach().to("cpu", copy=True).contiguous()

    def _place(self, name: str) -> torch.Tensor | None:
        found = self._find(name)
        return found if found is not None and found.is_contiguous() else None

    def tensor(self, name: str) -> torch.Tensor:
        """What is held of a tensor, as it was sent.

        Raises:
            WeightsError: ``weights.base``: nothing.
        """
        found = self._copies.get(name)
        if found is None and name in self._held:
            found = self._place(name)
        if found is None:
            raise WeightsError(
                f"blocks came of the tensor {name!r}, which is not held",
                code="weights.base",
                where=name,
                fix="send a full update",
            )
        return found

    def unchanged(self, changes: Iterable[str]) -> dict[str, str]:
        """Digests of what a delta leaves as it is, taken now; by name.

        Args:
            changes: the names that came.
        """
        changed = {name.removeprefix(PREFIX) for name in changes}
        return {name: digest(self.tensor(name)) for name in self._held if name not in changed}

    def apply(
        self, changes: Mapping[str, torch.Tensor], version: int, digests: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Change what is held; yields the whole tensors that have to be loaded where they are not held in place.

        Args:
            changes: what came, by the name under which it came.
            version: that is held once the iterator is exhausted.
            digests: gets those of the changed tensors, by name.

        Raises:
            WeightsError: ``weights.transfer``: blocks that do not fit; ``weights.base``.
        """
        self.version = None  # half a version is none
        for sent_name, tensor in changes.items():
            name = sent_name.removeprefix(PREFIX)
            if name == sent_name:
                yield name, tensor
                self.keep(name, tensor)
            else:
                whole = self.tensor(name)
                _unpack(name, tensor, whole)
                if name in self._copies:
                    yield name, whole
            digests[name] = digest(self.tensor(name))
        self.version = version


def _unpack(name: str, packed: torch.Tensor, whole: torch.Tensor) -> None:
    """Write blocks into a tensor, in place."""
    import torch

    # of one element, any stride counts as contiguous
    target = whole.detach().as_strided((whole.numel(),), (1,)).view(torch.uint8)
    size = target.numel()
    block_bytes, count = packed[: 2 * _WORD].view(torch.int64).tolist() if packed.numel() >= 2 * _WORD else (0, 0)
    start = (2 + count) * _WORD
    full = size // block_bytes if block_bytes > 0 else 0
    numbers = packed[2 * _WORD : start].view(torch.int64) if packed.numel() >= start else torch.empty(0)
    fits = 0 < count == len(numbers) and bool((numbers[1:] > numbers[:-1]).all()) and int(numbers[0]) >= 0
    short = bool(fits and int(numbers[-1]) == full)
    if not fits or int(numbers[-1]) * block_bytes >= size or packed.numel() != start + (
        (count - short) * block_bytes + (size - full * block_bytes if short else 0)
    ):  # fmt: skip
        raise WeightsError(f"blocks came that do not fit the tensor {name!r}", where=name, expected=f"{size} bytes")
    inner = count - short
    blocks = packed[start : start + inner * block_bytes].view(inner, block_bytes).to(target.device)
    target[: full * block_bytes].view(full, block_bytes).index_copy_(0, numbers[:inner].to(target.device), blocks)
    if short:
        target[full * block_bytes :].copy_(packed[start + inner * block_bytes :])
