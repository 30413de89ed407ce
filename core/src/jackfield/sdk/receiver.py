"""The receiving end of a weight transfer. It checks what an engine delivers and applies deltas.

A delta has the blocks of bytes of each tensor that have changed since a version that every worker holds. The blocks of
a tensor are sent as one uint8 tensor, whose name is :data:`PREFIX` and the changed tensor's name,

    int64 block_bytes | int64 count | int64 index of each changed block | the blocks, one after the other

in little-endian order; the last block of a tensor may be short. A tensor that is new, or of which every block has
changed, is sent whole under its own name. Digests of the whole tensors, computed at both ends, verify the result.
"""

from __future__ import annotations

import ctypes
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import attrs
import xxhash

from jackfield.abc.checkpoint_engine import CheckpointEngine, CheckpointEngineContext, ConnectRequest
from jackfield.errors import WeightsError
from jackfield.plugins import load_plugin
from jackfield.sdk.buckets import digest, raw

if TYPE_CHECKING:
    import torch

    from jackfield.abc.rollout import UpdateWeightsRequest

__all__ = ["PREFIX", "HeldWeights", "WeightReceiver", "check_base", "open_receiver", "reopen_receiver"]

PREFIX = "delta:"  #: prefix of the name of a tensor of changed blocks
_HEAD = 16  #: bytes before the indexes


def open_receiver(
    request: UpdateWeightsRequest,
    worker: int = 0,
    *,
    device: str = "cpu",
    host: str = "127.0.0.1",
    held: HeldWeights | None = None,
) -> WeightReceiver:
    """Create the receiver of an update for a worker, by its number within the replica.

    ``device`` receives the tensors, if the checkpoint engine can choose, and servers of the worker listen at ``host``.
    ``held`` are the worker's weights, which outlive the receiver; they are dropped unless the update is or precedes a
    delta.
    """
    rank, seconds = request.first_worker + worker, request.deadline_seconds
    world: dict[str, Any] = {"rank": rank, "world_size": request.total_workers, "device": device, "host": host}
    context = CheckpointEngineContext(end="receiver", deadline_seconds=seconds, **world)
    plugin, settings = load_plugin("checkpoint_engine", request.checkpoint_engine), request.checkpoint_engine_config
    engine: Any = plugin.build(dict(settings), context)
    if held is not None and request.kind != "delta" and not (request.kind == "full" and request.deltas_follow):
        held.forget()
        held = None
    return WeightReceiver(engine, held)


def reopen_receiver(
    last: WeightReceiver | None, request: UpdateWeightsRequest, worker: int = 0, **options: Any
) -> WeightReceiver:
    """Call :func:`open_receiver` with further ``options`` after the worker's ``last`` receiver, if any.

    What its checkpoint engine has kept (buffers, groups, registrations) is used again, unless settings or the number of
    workers have changed.
    """
    receiver = open_receiver(request, worker, **options)
    kept, made = None if last is None else last._engine, receiver._engine
    if kept is not None and (type(kept), kept.config, kept.context) == (type(made), made.config, made.context):
        receiver._engine = kept
    return receiver


@attrs.define(eq=False)
class WeightReceiver:
    """The receiving end of one inference worker, which can be used repeatedly.

    Both methods raise ``WeightsError`` with ``weights.transfer``, or ``weights.missing`` for a name that arrives twice,
    and ``DeadlineExceeded``, which names the sender.
    """

    _engine: CheckpointEngine  #: an engine for the end ``receiver``
    _held: HeldWeights | None = None  #: the worker's held weights; None: there will be no delta
    digests: dict[str, str] = attrs.field(factory=dict, init=False)  #: digests of the last received tensors, by name

    async def tensors(
        self, arguments: Mapping[str, Any], version: int
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Connect with this worker's arguments, yield every tensor of a version, then disconnect.

        A tensor is valid until the next one is drawn. Iterate inside ``contextlib.aclosing`` if the loop may be left
        early.
        """
        held = self._held
        if held is not None:
            held.forget()
        async with aclosing(self._received(arguments, version)) as stream:
            async for name, tensor in stream:
                self.digests[name] = digest(tensor)
                yield name, tensor
                if held is not None:
                    held.keep(name, tensor)
        if held is not None:
            held.version = version

    async def changes(self, arguments: Mapping[str, Any], version: int, base: int | None) -> dict[str, torch.Tensor]:
        """Connect, receive a whole delta to version ``base`` and disconnect; no weight is changed yet.

        Return the received tensors by name, in host memory, for :meth:`HeldWeights.apply`. Raises ``weights.base`` if
        another version is held.
        """
        assert self._held is not None, "a worker that takes deltas holds weights"
        check_base(self._held.version, base)
        async with aclosing(self._received(arguments, version)) as stream:
            return {name: tensor.detach().to("cpu", copy=True) async for name, tensor in stream}

    async def _received(
        self, arguments: Mapping[str, Any], version: int
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        self.digests, seen = {}, set[str]()
        try:
            await self._engine.connect(ConnectRequest(arguments=arguments, version=version))
            async with aclosing(self._engine.receive_weights()) as stream:
                async for name, tensor in stream:
                    if name in seen:
                        raise WeightsError(f"tensor {name!r} arrived twice", code="weights.missing", where=name)
                    seen.add(name)
                    yield name, tensor
        finally:
            await self._engine.finalize()


def check_base(held: int | None, base: int | None) -> None:
    """Raise ``weights.base`` unless the base version of a delta is held."""
    if base is None or held != base:
        expected, found = "no delta" if held is None else f"a delta to version {held}", f"a delta to version {base}"
        message, fix = "a delta came to weights that are not held", "send a full update, or set weights.on_missing_base"
        raise WeightsError(message, code="weights.base", expected=expected, found=found, fix=fix)


@attrs.define(eq=False)
class HeldWeights:
    """The last version that a worker received, byte for byte, as the base of a delta.

    A tensor whose parameter has exactly these bytes is changed in place. For any other tensor (cast, sharded,
    quantised) a copy is kept in host memory.
    """

    #: returns the loaded parameter, or the part of it, that has a tensor's bytes as they were sent
    _find: Callable[[str], torch.Tensor | None] = lambda _: None
    #: copies by name; None: the tensor is held in place
    _held: dict[str, torch.Tensor | None] = attrs.field(factory=dict, init=False)
    #: version that is held completely; None: a delta cannot be loaded
    version: int | None = attrs.field(default=None, init=False)

    def forget(self) -> None:
        """Drop everything, because the loaded weights differ from what was sent."""
        self._held, self.version = {}, None

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Record a tensor that has been loaded, as it was sent."""
        found = self._place(name)
        same = found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        self._held[name] = None if same else tensor.detach().to("cpu", copy=True).contiguous()

    def _place(self, name: str) -> torch.Tensor | None:
        found = self._find(name)
        return found if found is not None and found.is_contiguous() else None

    def tensor(self, name: str) -> torch.Tensor:
        """Return the held bytes of a tensor, as it was sent; ``weights.base`` if the tensor is not held."""
        found = self._held.get(name)
        if found is None and name in self._held:
            found = self._place(name)
        if found is None:
            message = f"blocks came of the tensor {name!r}, which is not held"
            raise WeightsError(message, code="weights.base", where=name, fix="send a full update")
        return found

    def unchanged(self, changes: Iterable[str]) -> dict[str, str]:
        """Compute the digests, by name, of the tensors that a delta with these names does not change."""
        changed = {name.removeprefix(PREFIX) for name in changes}
        return {name: digest(self.tensor(name)) for name in self._held if name not in changed}

    def apply(
        self, changes: Mapping[str, torch.Tensor], version: int, digests: dict[str, str]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Apply a delta and yield the whole tensors, not held in place, that have to be loaded.

        ``changes`` are the received tensors by the names under which they were sent, and ``digests`` gets those of the
        changed tensors. ``version`` is held once the iterator is exhausted. Raises ``weights.transfer`` if blocks do
        not fit, ``weights.base`` if a tensor is not held.
        """
        self.version = None  # a partly applied version is not held
        for sent_name, tensor in changes.items():
            if (name := sent_name.removeprefix(PREFIX)) == sent_name:
                yield name, tensor
                self.keep(name, tensor)
            else:
                _unpack(name, tensor, whole := self.tensor(name))
                if self._held[name] is not None:
                    yield name, whole
            digests[name] = digest(self.tensor(name))
        self.version = version


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
    """Return a tensor's name and its changed blocks, packed, or all of it; None if it is unchanged."""
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


def _unpack(name: str, packed: torch.Tensor, whole: torch.Tensor) -> None:
    """Write blocks into a tensor, in place."""
    import torch

    # a tensor of one element counts as contiguous with any stride
    target = whole.detach().as_strided((whole.numel(),), (1,)).view(torch.uint8)
    size = target.numel()
    block_bytes, count = packed[:_HEAD].view(torch.int64).tolist() if packed.numel() >= _HEAD else (0, 0)
    start = _HEAD + 8 * count
    fits = block_bytes > 0 < count and start < packed.numel()
    indexes = packed[_HEAD : start if fits else _HEAD].view(torch.int64)
    full = size // block_bytes if fits else 0
    short = bool(fits and indexes[-1] == full)
    left = (count - short) * block_bytes + short * (size - full * block_bytes)
    rises = bool((indexes[1:] > indexes[:-1]).all())
    if not (fits and rises and 0 <= indexes[0] and indexes[-1] * block_bytes < size and packed.numel() == start + left):
        raise WeightsError(f"blocks came that do not fit the tensor {name!r}", where=name, expected=f"{size} bytes")
    inner = count - short
    blocks = packed[start : start + inner * block_bytes].view(inner, block_bytes).to(target.device)
    target[: full * block_bytes].view(full, block_bytes).index_copy_(0, indexes[:inner].to(target.device), blocks)
    if short:
        target[full * block_bytes :].copy_(packed[start + inner * block_bytes :])
