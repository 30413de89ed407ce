"""The two ends of a transfer, with the checks that no checkpoint engine has to make: names and digests."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

from jackfield.abc.checkpoint_engine import CheckpointEngine, ConnectRequest, PrepareResult
from jackfield.errors import WeightsError
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

    def __init__(self, engine: CheckpointEngine, source: WeightSource | None = None) -> None:
        """
        Args:
            engine: this rank's checkpoint engine, of side ``trainer``.
            source: the rank's training engine's ``get_per_tensor_param``; None: weights are given to :meth:`send`.
        """
        self._engine = engine
        self._source = source
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
        await self._engine.connect(ConnectRequest(arguments=arguments, version=version))

    async def send(self, weights: Generator[tuple[str, torch.Tensor], None, None] | None = None) -> dict[str, str]:
        """Send every tensor; returns their digests by name, taken before or while they are sent.

        Args:
            weights: named tensors; None: those of the last :meth:`open`.

        Raises:
            WeightsError: ``weights.missing`` for a name that comes twice, ``weights.transfer`` without weights.
        """
        opened, self._opened = self._opened, None
        weights = opened if weights is None else weights
        if weights is None:
            raise WeightsError("there are no weights to send", fix="give them, or give a source and call open()")
        digests: dict[str, str] = {}
        self.sent_bytes = 0
        watched = self._watched(weights, digests)
        try:
            await self._engine.send_weights(watched)
        finally:
            watched.close()
            weights.close()  # after a failure, the source may have things to put back
        return digests

    def _watched(
        self, weights: Generator[tuple[str, torch.Tensor], None, None], digests: dict[str, str]
    ) -> Generator[tuple[str, torch.Tensor], None, None]:
        with ThreadPoolExecutor(1, thread_name_prefix="weights-digest") as thread:
            for name, tensor in weights:
                if name in digests:
                    raise WeightsError(f"the engine exports tensor {name!r} twice", code="weights.missing", where=name)
                self.sent_bytes += tensor.nbytes
                if tensor.nbytes < _LARGE or tensor.device.type != "cpu":
                    digests[name] = digest(tensor)
                    yield name, tensor
                else:  # while it is sent; a device's tensors stay with the stream of this thread
                    taken = thread.submit(digest, tensor)
                    yield name, tensor
                    digests[name] = taken.result()

    async def finalize(self) -> None:
        """Release what the transfer took; idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()
        await self._engine.finalize()


class WeightReceiver:
    """The side of one inference worker. Repeatable."""

    def __init__(self, engine: CheckpointEngine) -> None:
        """
        Args:
            engine: this worker's checkpoint engine, of side ``rollout``.
        """
        self._engine = engine
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
        self.digests = {}
        try:
            await self._engine.connect(ConnectRequest(arguments=arguments, version=version))
            async with aclosing(self._engine.receive_weights()) as stream:
                async for name, tensor in stream:
                    if name in self.digests:
                        raise WeightsError(f"tensor {name!r} arrived twice", code="weights.missing", where=name)
                    self.digests[name] = digest(tensor)
                    yield name, tensor
        finally:
            await self._engine.finalize()
