"""The two ends of a transfer, with the checks that no checkpoint engine has to make: names and digests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

from jackfield.abc.checkpoint_engine import CheckpointEngine, ConnectRequest, PrepareResult
from jackfield.errors import WeightsError
from jackfield.weights.delta import Blocks, HeldWeights, SentVersions
from jackfield.weights.digest import digest

if TYPE_CHECKING:
    import torch

__all__ = ["WeightReceiver", "WeightSender", "WeightSource", "Weights"]

_LARGE = 1 << 20  #: bytes; the digest of such a tensor is worth a thread

#: Named tensors, and the PEFT config when they are an adapter's: what ``get_per_tensor_param`` returns.
Weights: TypeAlias = "tuple[Generator[tuple[str, torch.Tensor], None, None], Mapping[str, Any] | None]"

#: Where a sender takes weights from: a training engine's ``get_per_tensor_param``.
WeightSource: TypeAlias = Callable[[], Weights]


class WeightSender:
    """The trainer's side, one rank. Repeatable from :meth:`prepare`."""

    def __init__(self, engine: CheckpointEngine, source: WeightSource | None = None, *, block_bytes: int = 0) -> None:
        """
        Args:
            engine: this rank's checkpoint engine, of the end ``sender``.
            source: the rank's training engine's ``get_per_tensor_param``; None: weights are given to :meth:`send`.
            block_bytes: by which deltas are made, see :mod:`jackfield.weights.delta`; 0: none will be sent.
        """
        self._engine = engine
        self._source = source
        self._sent = SentVersions(block_bytes) if block_bytes else None
        self._version = 0
        self._opened: Generator[tuple[str, torch.Tensor], None, None] | None = None
        self.sent_bytes = 0  #: of the last transfer

    def open(self) -> Mapping[str, Any] | None:
        """Ask the source for its weights; returns the PEFT config when they are an adapter's."""
        if self._source is None:
            return None
        self._opened, peft_config = self._source()
        return peft_config

    def prepare(self) -> PrepareResult:
        """See :meth:`CheckpointEngine.prepare`."""
        return self._engine.prepare()

    async def connect(self, arguments: Mapping[str, Any], version: int) -> None:
        """Meet the workers."""
        self._version = version
        await self._engine.connect(ConnectRequest(arguments=arguments, version=version))

    def knows(self, version: int) -> bool:
        """Whether a delta to ``version`` can be sent."""
        return self._sent is not None and version in self._sent

    async def send(
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None] | None = None,
        *,
        base: int | None = None,
    ) -> dict[str, str]:
        """Send every tensor; returns their digests by name, taken before or while they are sent.

        Args:
            weights: named tensors; None: those of the last :meth:`open`.
            base: the version that every worker holds, to send what has changed since; None: to send everything.

        Raises:
            WeightsError: ``weights.missing`` for a name that comes twice, ``weights.transfer`` without weights,
                ``weights.base`` for a version that is not :meth:`known <knows>`.
        """
        if base is not None and not self.knows(base):
            raise WeightsError(
                "a delta is to be made to a version that the sender has no digests of",
                code="weights.base",
                expected="one of the last two versions that it has sent",
                found=base,
            )
        opened, self._opened = self._opened, None
        weights = opened if weights is None else weights
        if weights is None:
            raise WeightsError("there are no weights to send", fix="give them, or give a source and call open()")
        digests: dict[str, str] = {}
        self.sent_bytes = 0
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
        self,
        weights: Generator[tuple[str, torch.Tensor], None, None],
        digests: dict[str, str],
        blocks: dict[str, Blocks],
        base: int | None,
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        """What is sent of each tensor; digests of all are noted on the way."""
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as thread:
            for name, tensor in weights:
                if name in digests:
                    raise WeightsError(f"the engine exports tensor {name!r} twice", code="weights.missing", where=name)
                if base is not None or tensor.nbytes < _LARGE or tensor.device.type != "cpu":
                    self._note(name, tensor, digests, blocks)
                    yield from self._part(name, tensor, blocks, base)
                else:  # while it is sent; a device's tensors stay with the stream of this thread
                    noted = thread.submit(self._note, name, tensor, digests, blocks)
                    yield from self._part(name, tensor, blocks, base)
                    noted.result()

    def _note(self, name: str, tensor: torch.Tensor, digests: dict[str, str], blocks: dict[str, Blocks]) -> None:
        if self._sent is not None:
            tensor = tensor.detach().cpu()
            blocks[name] = self._sent.blocks(tensor)
        digests[name] = digest(tensor)

    def _part(
        self, name: str, tensor: torch.Tensor, blocks: dict[str, Blocks], base: int | None
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        part: tuple[str, torch.Tensor] | None = (name, tensor)
        if base is not None:
            assert self._sent is not None
            part = self._sent.change(name, tensor, blocks[name], base)
        if part is not None:
            self.sent_bytes += part[1].nbytes
            yield part

    async def finalize(self) -> None:
        """Release what the transfer took; idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        await self._engine.finalize()


class WeightReceiver:
    """The side of one inference worker. Repeatable."""

    def __init__(self, engine: CheckpointEngine, held: HeldWeights | None = None) -> None:
        """
        Args:
            engine: this worker's checkpoint engine, of the end ``receiver``.
            held: the worker's, which outlives the receiver; None: no delta will come.
        """
        self._engine = engine
        self._held = held
        self.digests: dict[str, str] = {}  #: of what was received last, by name

    async def tensors(
        self, arguments: Mapping[str, Any], version: int
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Connect, yield every tensor (each valid until the next one is drawn), and release everything.

        Iterate inside of ``contextlib.aclosing`` where the loop may be left early.

        Args:
            arguments: this worker's share of the topology.
            version: of the weights.

        Raises:
            WeightsError: ``weights.missing`` for a name that arrives twice; ``weights.transfer``.
            DeadlineExceeded: naming the sender.
        """
        if self._held is not None:
            self._held.forget()
        async with aclosing(self._received(arguments, version)) as stream:
            async for name, tensor in stream:
                self.digests[name] = digest(tensor)
                yield name, tensor
                if self._held is not None:
                    self._held.keep(name, tensor)
        if self._held is not None:
            self._held.version = version

    async def changes(self, arguments: Mapping[str, Any], version: int, base: int | None) -> dict[str, torch.Tensor]:
        """Connect, receive a delta to version ``base`` as a whole, and release everything; nothing is changed yet.

        Returns:
            What came, by the name under which it came, for :meth:`HeldWeights.apply`; in host memory.

        Raises:
            WeightsError: ``weights.base``: another version is held; as :meth:`tensors`.
            DeadlineExceeded: naming the sender.
        """
        assert self._held is not None, "whoever takes deltas holds weights"
        self._held.check(base)
        found: dict[str, torch.Tensor] = {}
        async with aclosing(self._received(arguments, version)) as stream:
            async for name, tensor in stream:
                found[name] = tensor.detach().to("cpu", copy=True)
        return found

    async def _received(
        self, arguments: Mapping[str, Any], version: int
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        self.digests = {}
        seen: set[str] = set()
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
