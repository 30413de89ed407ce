"""The sending end of a weight transfer, which computes digests and deltas."""

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

_LARGE = 1 << 20  #: bytes from which a tensor's digest is computed in a thread
_VERSIONS = 2  #: versions that a sender remembers: the one that every worker holds, and the one in transfer

Tensors: TypeAlias = "Generator[tuple[str, torch.Tensor], None, None]"

#: A training engine's ``get_per_tensor_param``: returns named tensors, and the PEFT config if they are an adapter's.
WeightSource: TypeAlias = Callable[[], tuple[Tensors, "Mapping[str, Any] | None"]]


@attrs.frozen(kw_only=True)
class PreparedSender:
    """The state of a sending rank before the workers connect."""

    metadata: Mapping[str, Any]
    peft_config: Mapping[str, Any] | None = None  #: None if the weights are not an adapter's


@attrs.define(eq=False)
class WeightSender:
    """The sender of one trainer rank. Each transfer starts with :meth:`prepare`."""

    _engine: CheckpointEngine  #: this rank's checkpoint engine, for the end ``sender``
    _source: WeightSource | None = None  #: None: weights are passed to :meth:`send`
    #: size of the blocks of a delta, in bytes; 0: deltas are never sent
    _block_bytes: int = attrs.field(default=0, kw_only=True)
    sent_bytes: int = attrs.field(default=0, init=False)  #: bytes sent in the last transfer
    _version: int = attrs.field(default=0, init=False)
    _opened: Tensors | None = attrs.field(default=None, init=False)
    #: block digests of the last sent versions: 8 bytes for each block of each tensor
    _sent: dict[int, dict[str, Blocks]] = attrs.field(factory=dict, init=False)

    async def prepare(self) -> PreparedSender:
        """Get the weights from the source, and listen for workers."""
        peft_config = None
        if self._source is not None:
            self._opened, peft_config = self._source()
        return PreparedSender(metadata=(await self._engine.prepare()).metadata, peft_config=peft_config)

    async def build_topology(self, request: TopologyRequest) -> Topology:
        """Choose which ends are connected; see :meth:`CheckpointEngine.build_topology`."""
        return self._engine.build_topology(request)

    async def connect(self, arguments: Mapping[str, Any], version: int) -> None:
        """Connect to the workers."""
        self._version = version
        await self._engine.connect(ConnectRequest(arguments=arguments, version=version))

    async def knows(self, version: int) -> bool:
        """Return whether a delta can be computed against ``version``."""
        return version in self._sent

    async def transfer(
        self, arguments: Mapping[str, Any], version: int, base: int | None
    ) -> tuple[dict[str, str], int]:
        """Connect and send the weights of the source. Return digests by name, and the bytes sent."""
        await self.connect(arguments, version)
        return await self.send(base=base), self.sent_bytes

    async def send(self, weights: Tensors | None = None, *, base: int | None = None) -> dict[str, str]:
        """Send all tensors; return their digests by name, computed before or while sending.

        Args:
            weights: Named tensors. None sends those of the source.
            base: The version that every worker holds, to send only changes since then. None sends everything.

        Raises:
            WeightsError: ``weights.missing`` if a name occurs twice, ``weights.transfer`` if there are no weights,
                ``weights.base`` if ``base`` is not :meth:`known <knows>`.
        """
        if base is not None and base not in self._sent:
            message = "a delta is to be made to a version that the sender has no digests of"
            expected = f"one of the last {_VERSIONS} versions that it has sent"
            raise WeightsError(message, code="weights.base", expected=expected, found=base)
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
            weights.close()  # after a failure, the source may have to clean up
        if self._block_bytes:
            self._sent.pop(self._version, None)
            self._sent[self._version] = blocks
            self._sent = dict(list(self._sent.items())[-_VERSIONS:])
        return digests

    def _watched(
        self, weights: Tensors, digests: dict[str, str], blocks: dict[str, Blocks], base: int | None
    ) -> Tensors:
        """Yield the tensors or deltas to send, and collect the digests of all tensors."""

        def note(name: str, tensor: torch.Tensor) -> None:
            if self._block_bytes:
                tensor = tensor.detach().cpu()
                blocks[name] = Blocks.of(tensor, self._block_bytes)
            digests[name] = digest(tensor)

        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as thread:
            for name, tensor in weights:
                if name in digests:
                    raise WeightsError(f"the engine exports tensor {name!r} twice", code="weights.missing", where=name)
                noting = None
                part: tuple[str, torch.Tensor] | None = (name, tensor)
                if base is None and tensor.nbytes >= _LARGE and tensor.device.type == "cpu":  # while it is sent
                    noting = thread.submit(note, name, tensor)
                else:  # device tensors stay on this thread's stream
                    note(name, tensor)
                if base is not None:
                    before = self._sent[base].get(name)
                    part = delta_of(name, tensor, before, blocks[name], self._block_bytes)
                if part is not None:
                    self.sent_bytes += part[1].nbytes
                    yield part
                if noting is not None:
                    noting.result()

    async def finalize(self) -> None:
        """Release the resources of the transfer. It is idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        await self._engine.finalize()


@attrs.frozen(eq=False)
class Blocks:
    """The digests of a tensor's blocks."""

    kind: tuple[torch.dtype, torch.Size]  #: dtype and shape of the tensor
    digests: torch.Tensor  #: xxh3_64 of each block, int64 ``[blocks]``

    @classmethod
    def of(cls, tensor: torch.Tensor, block_bytes: int) -> Blocks:
        """Compute the block digests of a tensor of any dtype, shape, stride and device."""
        import torch

        content, digests = raw(tensor).cpu(), torch.empty(0, dtype=torch.int64)
        if size := content.numel():
            memory = memoryview((ctypes.c_char * size).from_address(content.data_ptr())).cast("B")
            starts = range(0, size, block_bytes)
            found = bytearray().join(xxhash.xxh3_64_digest(memory[start : start + block_bytes]) for start in starts)
            digests = torch.frombuffer(found, dtype=torch.int64)
        return cls((tensor.dtype, tensor.shape), digests)


def delta_of(
    name: str, tensor: torch.Tensor, before: Blocks | None, after: Blocks, block_bytes: int
) -> tuple[str, torch.Tensor] | None:
    """Return a tensor's name and changed blocks, or all of it; None if it is unchanged.

    Changed blocks are packed as :mod:`jackfield.sdk.receiver` describes.
    """
    import torch

    if before is None or before.kind != after.kind:
        return name, tensor
    changed = (before.digests != after.digests).nonzero().flatten()
    if not len(changed):
        return None
    if len(changed) == len(after.digests):
        return name, tensor
    content = raw(tensor).cpu()
    head = torch.cat((torch.tensor([block_bytes, len(changed)]), changed)).view(torch.uint8)
    full = content.numel() // block_bytes
    blocks = content[: full * block_bytes].view(full, block_bytes)[changed[changed < full]].flatten()
    short = content[full * block_bytes :] if changed[-1] == full else content[:0]
    return PREFIX + name, torch.cat((head, blocks, short))
