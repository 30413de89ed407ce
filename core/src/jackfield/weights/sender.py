"""The sending end of a weight transfer: names, digests, and the changes since a version that every worker holds."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeAlias

import attrs
import xxhash

from jackfield.abc.checkpoint_engine import CheckpointEngine, ConnectRequest, Topology, TopologyRequest
from jackfield.errors import WeightsError
from jackfield.sdk.buckets import digest, raw
from jackfield.sdk.receiver import PREFIX

if TYPE_CHECKING:
    import torch

_LARGE = 1 << 20  #: bytes; the digest of such a tensor is worth a thread
_VERSIONS = 2  #: that a sender remembers: the one that every worker holds, and the one that is on its way

Tensors: TypeAlias = "Generator[tuple[str, torch.Tensor], None, None]"

#: Where a sender takes weights from, a training engine's ``get_per_tensor_param``: named tensors, and the PEFT config
#: when they are an adapter's.
WeightSource: TypeAlias = Callable[[], tuple[Tensors, "Mapping[str, Any] | None"]]


@attrs.frozen(kw_only=True)
class PreparedSender:
    """What is known of a rank before the workers connect."""

    metadata: Mapping[str, Any]
    peft_config: Mapping[str, Any] | None = None  #: None: the weights are not an adapter's


class WeightSender:
    """One rank of the trainer. It can be used again from :meth:`prepare` on."""

    def __init__(self, engine: CheckpointEngine, source: WeightSource | None = None, *, block_bytes: int = 0) -> None:
        """
        Args:
            engine: This rank's checkpoint engine, of the end ``sender``.
            source: The rank's training engine's ``get_per_tensor_param``; None: weights are given to :meth:`send`.
            block_bytes: The size of the blocks that deltas consist of; 0: no delta will be sent.
        """
        self._engine, self._source = engine, source
        self._sent = SentVersions(block_bytes) if block_bytes else None
        self._version = 0
        self._opened: Tensors | None = None
        self.sent_bytes = 0  #: of the last transfer

    async def prepare(self) -> PreparedSender:
        """Ask the source for its weights, and listen."""
        peft_config = None
        if self._source is not None:
            self._opened, peft_config = self._source()
        return PreparedSender(metadata=(await self._engine.prepare()).metadata, peft_config=peft_config)

    async def build_topology(self, request: TopologyRequest) -> Topology:
        """Decide who sends to whom; see :meth:`CheckpointEngine.build_topology`."""
        return self._engine.build_topology(request)

    async def connect(self, arguments: Mapping[str, Any], version: int) -> None:
        """Meet the workers."""
        self._version = version
        await self._engine.connect(ConnectRequest(arguments=arguments, version=version))

    async def knows(self, version: int) -> bool:
        """Return whether a delta to ``version`` can be sent."""
        return self._sent is not None and version in self._sent

    async def send_version(self, base: int | None) -> tuple[dict[str, str], int]:
        """Send the weights of the source: :meth:`send` for other processes. Returns digests, and bytes sent."""
        return await self.send(base=base), self.sent_bytes

    async def send(self, weights: Tensors | None = None, *, base: int | None = None) -> dict[str, str]:
        """Send every tensor and return their digests by name, taken before or while they are sent.

        Args:
            weights: Named tensors; None: those of the source.
            base: The version that every worker holds, to send what has changed since; None: to send everything.

        Raises:
            WeightsError: ``weights.missing`` for a name that comes twice, ``weights.transfer`` without weights,
                ``weights.base`` for a version that is not :meth:`known <knows>`.
        """
        if base is not None and not await self.knows(base):
            raise WeightsError(
                "a delta is to be made to a version that the sender has no digests of",
                code="weights.base",
                expected="one of the last two versions that it has sent",
                found=base,
            )
        opened, self._opened = self._opened, None
        weights = opened if weights is None else weights
        if weights is None:
            raise WeightsError("there are no weights to send", fix="give them, or give a source and call prepare()")
        self.sent_bytes = 0
        digests: dict[str, str] = {}
        blocks: dict[str, Blocks] = {}
        watched = self._watched(weights, digests, blocks, base)
        try:
            await self._engine.send_weights(watched)
        finally:
            watched.close()
            weights.close()  # after a failure, the source may have things to put back
        if self._sent is not None:
            self._sent.remember(self._version, blocks)
        return digests

    def _watched(
        self, weights: Tensors, digests: dict[str, str], blocks: dict[str, Blocks], base: int | None
    ) -> Tensors:
        """Yield what is sent of each tensor; the digests of all are noted on the way."""
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as thread:
            for name, tensor in weights:
                if name in digests:
                    raise WeightsError(f"the engine exports tensor {name!r} twice", code="weights.missing", where=name)
                noted = None
                if base is None and tensor.nbytes >= _LARGE and tensor.device.type == "cpu":  # while it is sent
                    noted = thread.submit(self._note, name, tensor, digests, blocks)
                else:  # a device's tensors stay with the stream of this thread
                    self._note(name, tensor, digests, blocks)
                part: tuple[str, torch.Tensor] | None = (name, tensor)
                if base is not None:
                    assert self._sent is not None
                    part = self._sent.change(name, tensor, blocks[name], base)
                if part is not None:
                    self.sent_bytes += part[1].nbytes
                    yield part
                if noted is not None:
                    noted.result()

    def _note(self, name: str, tensor: torch.Tensor, digests: dict[str, str], blocks: dict[str, Blocks]) -> None:
        if self._sent is not None:
            tensor = tensor.detach().cpu()
            blocks[name] = self._sent.blocks(tensor)
        digests[name] = digest(tensor)

    async def finalize(self) -> None:
        """Release what the transfer took; idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        await self._engine.finalize()


@attrs.frozen(eq=False)
class Blocks:
    """The digests of a tensor's blocks."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digests: torch.Tensor  #: xxh3_64 of each, int64 ``[blocks]``

    @classmethod
    def of(cls, tensor: torch.Tensor, block_bytes: int) -> Blocks:
        """Compute those of a tensor of any dtype, shape, stride and device."""
        import torch

        content = raw(tensor).cpu()
        size, found = content.numel(), b""
        if size:
            memory = memoryview((ctypes.c_char * size).from_address(content.data_ptr())).cast("B")
            starts = range(0, size, block_bytes)
            found = b"".join(xxhash.xxh3_64_digest(memory[start : start + block_bytes]) for start in starts)
        digests = torch.frombuffer(bytearray(found), dtype=torch.int64) if found else torch.empty(0, dtype=torch.int64)
        return cls(tensor.dtype, tuple(tensor.shape), digests)

    def changed(self, other: Blocks) -> torch.Tensor | None:
        """Return the indexes of blocks that differ from ``other``, int64; None: they have nothing in common."""
        if (self.dtype, self.shape) != (other.dtype, other.shape):
            return None
        return (self.digests != other.digests).nonzero().flatten()


class SentVersions:
    """What a sender remembers of the last versions that it has sent: 8 bytes for each block."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._versions: dict[int, dict[str, Blocks]] = {}

    def __contains__(self, version: int) -> bool:
        return version in self._versions

    def blocks(self, tensor: torch.Tensor) -> Blocks:
        """Compute the digests of a tensor that is being sent."""
        return Blocks.of(tensor, self._block_bytes)

    def remember(self, version: int, blocks: dict[str, Blocks]) -> None:
        """Take note of a version that has been sent, whole or as a delta."""
        self._versions.pop(version, None)
        self._versions[version] = blocks
        while len(self._versions) > _VERSIONS:
            del self._versions[next(iter(self._versions))]

    def change(self, name: str, tensor: torch.Tensor, blocks: Blocks, base: int) -> tuple[str, torch.Tensor] | None:
        """Return what has to be sent of a tensor to workers that hold version ``base``; None: nothing."""
        before = self._versions[base].get(name)
        changed = None if before is None else blocks.changed(before)
        if changed is None or (len(changed) == len(blocks.digests) > 0):
            return name, tensor
        if not len(changed):
            return None
        return PREFIX + name, _packed(raw(tensor).cpu(), changed, self._block_bytes)


def _packed(content: torch.Tensor, changed: torch.Tensor, block_bytes: int) -> torch.Tensor:
    """Pack changed blocks as :mod:`jackfield.sdk.receiver` describes."""
    import torch

    head = torch.cat((torch.tensor([block_bytes, len(changed)]), changed)).view(torch.uint8)
    full = content.numel() // block_bytes
    blocks = content[: full * block_bytes].view(full, block_bytes)[changed[changed < full]].flatten()
    short = content[full * block_bytes :] if changed[-1] == full else content[:0]
    return torch.cat((head, blocks, short))
