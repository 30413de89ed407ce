"""One synchronisation: a version of the weights to all replicas, with proof."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypeVar

import attrs

from jackfield.abc.checkpoint_engine import PrepareResult, Topology, TopologyRequest
from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, UpdateWeightsRequest, WeightReceipt
from jackfield.clock import Clock
from jackfield.errors import WeightsError
from jackfield.weights.probe import ReplicaProbe
from jackfield.weights.sides import GRACE_SECONDS, run_all

__all__ = ["Replica", "Sender", "SyncReport", "Topologist", "WeightSynchronizer", "verify"]

Kind: TypeAlias = Literal["full", "adapter", "delta"]
T = TypeVar("T")

_SHOWN = 4  #: names in a message


class Sender(Protocol):
    """A trainer's rank: a :class:`~jackfield.weights.WeightSender`, or a stand-in for one elsewhere."""

    sent_bytes: int

    def open(self) -> Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None:
        """Take the weights from their source; the PEFT config when they are an adapter's."""
        ...

    def prepare(self) -> PrepareResult | Awaitable[PrepareResult]:
        """Listen."""
        ...

    async def connect(self, arguments: Mapping[str, Any], version: int) -> None:
        """Meet the workers."""
        ...

    def knows(self, version: int) -> bool | Awaitable[bool]:
        """Whether a delta to ``version`` can be sent."""
        ...

    async def send(self, *, base: int | None = None) -> dict[str, str]:
        """Send the weights, or what has changed of them since version ``base``; digests of all by name."""
        ...

    async def finalize(self) -> None:
        """Release everything; idempotent."""
        ...


class Topologist(Protocol):
    """Who decides which rank sends to which worker: a class of checkpoint engines, or a stand-in elsewhere."""

    def build_topology(self, request: TopologyRequest) -> Topology | Awaitable[Topology]:
        """See :meth:`~jackfield.abc.checkpoint_engine.CheckpointEngine.build_topology`."""
        ...


@attrs.frozen(eq=False)
class Replica:
    """A started replica."""

    server: BaseRolloutServer
    info: ServerInfo


@attrs.frozen(kw_only=True)
class SyncReport:
    """What a synchronisation did."""

    version: int
    receipts: tuple[WeightReceipt, ...]  #: by replica
    seconds: float
    paused_seconds: float  #: of the replica that paused longest
    bytes: int  #: that were sent to a worker
    kind: Kind = "full"
    digests: Mapping[str, str] = attrs.field(factory=dict)  #: of all tensors, by name
    peft_config: Mapping[str, Any] | None = None
    retained: Mapping[str, Any] | None = None  #: connect arguments of any worker that comes later; None: in vain


@attrs.frozen(kw_only=True)
class _Transfer:
    """What went, and what came back."""

    kind: Kind
    digests: Mapping[str, str]  #: what was sent or left as it was, by name
    receipts: Sequence[WeightReceipt]  #: by replica
    peft_config: Mapping[str, Any] | None
    retained: Mapping[str, Any] | None


class WeightSynchronizer:
    """Moves weights from the trainer's ranks to all inference workers, and believes nothing but their receipts."""

    def __init__(
        self,
        senders: Sequence[Sender],
        replicas: Sequence[Replica | BaseRolloutServer],
        name: str,
        engine_class: Topologist,
        clock: Clock,
        *,
        settings: Mapping[str, Any] | None = None,
        deadline_seconds: float = 600.0,
        probe: ReplicaProbe | None = None,
        kind: Literal["full", "delta"] = "full",
        on_missing_base: Literal["full", "stop"] = "full",
    ) -> None:
        """
        Args:
            senders: by trainer rank.
            replicas: all of them, started; a bare server counts as one worker. Read at the beginning of each
                synchronisation: somebody may add or remove some in between.
            name: of the checkpoint engine's plugin, by which each worker builds its receiver.
            engine_class: of the checkpoint engine, or what stands for it; decides the topology.
            clock: the run's.
            settings: of the checkpoint engine; workers get the same.
            deadline_seconds: of one synchronisation.
            probe: compares what replicas compute with what the engine computes, at the end of each
                synchronisation; None: nobody does, or somebody else.
            kind: delta: send what has changed since the last version that everybody acknowledged.
            on_missing_base: where somebody does not hold that version; full: send everything, stop: ``weights.base``.
        """
        self._senders = list(senders)
        self._replicas = replicas
        self._name = name
        self._engine_class = engine_class
        self._clock = clock
        self._settings = dict(settings or {})
        self._deadline_seconds = deadline_seconds
        self._probe = probe
        self._kind = kind
        self._on_missing_base: Literal["full", "stop"] = on_missing_base
        self.version: int | None = None  #: the last one that every replica has acknowledged
        self.last: SyncReport | None = None  #: of that version

    async def sync(self, version: int) -> SyncReport:
        """Bring ``version`` to every replica.

        Raises:
            WeightsError: ``weights.version`` when it is not newer than the last one or a replica acknowledges another;
                ``weights.missing`` or ``weights.digest`` naming replica, worker and tensors; ``weights.transfer`` when
                a side fails, and the other sides are then cancelled; ``weights.base``; ``weights.log-probs``. Every end
                is finalized.
            DeadlineExceeded: naming who had not finished.
        """
        if self.version is not None and version <= self.version:
            message = "a weight version goes backwards"
            raise WeightsError(message, code="weights.version", expected=f"above {self.version}", found=version)
        start = self._clock.time()
        replicas = [
            each if isinstance(each, Replica) else Replica(each, ServerInfo(replica=each.context.replica))
            for each in self._replicas
        ]
        done = await self._transferred(replicas, version)
        for replica, receipt in zip(replicas, done.receipts, strict=True):
            verify(replica.info, receipt, version, done.digests)
        if self._probe is not None and replicas:
            await self._probe.check({each.info.replica: each.server for each in replicas}, version)
        self.version = version
        self.last = SyncReport(
            version=version,
            receipts=tuple(done.receipts),
            seconds=self._clock.time() - start,
            paused_seconds=max((receipt.paused_seconds for receipt in done.receipts), default=0.0),
            bytes=self._senders[0].sent_bytes,
            kind=done.kind,
            digests=done.digests,
            peft_config=done.peft_config,
            retained=done.retained,
        )
        return self.last

    async def catch_up(self, replica: Replica, version: int) -> SyncReport:
        """Bring the engine's weights to one replica that was made anew, or is to join the others.

        Args:
            replica: started.
            version: of the weights that the engine has now; it must not train meanwhile.
        """
        alone = WeightSynchronizer(
            self._senders,
            [replica],
            self._name,
            self._engine_class,
            self._clock,
            settings=self._settings,
            deadline_seconds=self._deadline_seconds,
            probe=self._probe,
            kind=self._kind,
        )
        return await alone.sync(version)

    async def _base(self, replicas: Sequence[Replica]) -> int | None:
        """The version that a delta can be made to; None: everything has to be sent.

        Raises:
            WeightsError: ``weights.base``, where that is to stop the run.
        """
        if self._kind != "delta" or self.version is None:
            return None
        lacking = [
            f"sender {rank}" for rank, each in enumerate(self._senders) if not await _result(each.knows(self.version))
        ]
        asked = asyncio.gather(*(replica.server.health() for replica in replicas))
        who = f"replicas to say which weights they hold, before version {self.version} is followed by another"
        reports = await self._clock.wait_for(asked, self._deadline_seconds, who)
        for replica, report in zip(replicas, reports, strict=True):
            if not report.healthy or report.weight_version != self.version:
                lacking.append(f"replica {replica.info.replica}")
        if not lacking:
            return self.version
        self._without(f"{' and '.join(lacking)}: no weights of version {self.version}", None)
        return None

    def _without(self, why: str, error: WeightsError | None) -> None:
        """Send everything, or stop."""
        if self._on_missing_base == "stop":
            raise WeightsError(
                f"a delta cannot be sent: {why}",
                code="weights.base",
                expected=f"version {self.version} at every sender and replica",
                fix="weights.on_missing_base: full sends everything instead",
            ) from error
        logging.getLogger("jackfield").info("weights are sent as a whole, not as a delta: %s", why)

    async def _transferred(self, replicas: Sequence[Replica], version: int) -> _Transfer:
        """Transfer, once more as a whole where a delta is refused."""
        base = await self._base(replicas)
        try:
            return await self._transfer(replicas, version, base)
        except WeightsError as error:
            if base is None or error.code != "weights.base":
                raise
            self._without(error.message, error)
        finally:
            await self._finalize()
        try:
            return await self._transfer(replicas, version, None)
        finally:
            await self._finalize()

    async def _transfer(self, replicas: Sequence[Replica], version: int, base: int | None) -> _Transfer:
        peft_configs = [await _result(sender.open()) for sender in self._senders]
        base = base if peft_configs[0] is None else None  # an adapter is sent whole
        prepared = [await _result(sender.prepare()) for sender in self._senders]
        workers = sum(replica.info.workers for replica in replicas)
        metadata = tuple(result.metadata for result in prepared)
        request = TopologyRequest(trainer_metadata=metadata, rollout_workers=workers)
        topology: Topology = await _result(self._engine_class.build_topology(request))
        sides: dict[str, Coroutine[Any, Any, Any]] = {
            f"sender {rank}": self._send(sender, topology.trainer[rank], version, base)
            for rank, sender in enumerate(self._senders)
        }
        for replica, update in self._requests(replicas, topology, version, base, peft_configs[0]):
            sides[f"replica {replica.info.replica}"] = replica.server.update_weights(update)
        results = await run_all(sides, self._clock, self._deadline_seconds, f"weight version {version}")
        senders = len(self._senders)
        return _Transfer(
            kind=_kind(base, peft_configs[0]),
            digests=results[0],
            receipts=results[senders:],
            peft_config=peft_configs[0],
            retained=topology.retained,
        )

    @staticmethod
    async def _send(sender: Sender, arguments: Mapping[str, Any], version: int, base: int | None) -> dict[str, str]:
        await sender.connect(arguments, version)
        return await (sender.send() if base is None else sender.send(base=base))

    def _requests(
        self,
        replicas: Sequence[Replica],
        topology: Topology,
        version: int,
        base: int | None,
        peft_config: Mapping[str, Any] | None,
    ) -> list[tuple[Replica, UpdateWeightsRequest]]:
        """Each replica's request, with its workers' share of the topology."""
        requests, first = [], 0
        for replica in replicas:
            request = UpdateWeightsRequest(
                version=version,
                checkpoint_engine=self._name,
                checkpoint_engine_config=self._settings,
                connect=topology.rollout[first : first + replica.info.workers],
                first_worker=first,
                total_workers=len(topology.rollout),
                kind=_kind(base, peft_config),
                peft_config=peft_config,
                base_version=base,
                deltas_follow=self._kind == "delta",
                deadline_seconds=self._deadline_seconds,
            )
            requests.append((replica, request))
            first += replica.info.workers
        return requests

    async def _finalize(self) -> None:
        for rank, sender in enumerate(self._senders):
            await self._clock.wait_for(sender.finalize(), GRACE_SECONDS, f"sender {rank} to finalize")


def _kind(base: int | None, peft_config: Mapping[str, Any] | None) -> Kind:
    if peft_config is not None:
        return "adapter"
    return "full" if base is None else "delta"


async def _result(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


def verify(info: ServerInfo, receipt: WeightReceipt, version: int, sent: Mapping[str, str]) -> None:
    """Refuse a receipt that does not prove that every worker has loaded just what was sent."""
    where = f"replica {info.replica}"
    if receipt.version != version:
        raise WeightsError(
            f"{where} acknowledges another version", code="weights.version", where=where, expected=version,
            found=receipt.version,
        )  # fmt: skip
    workers = sorted(worker.worker for worker in receipt.workers)
    if receipt.replica != info.replica or workers != list(range(info.workers)):
        raise WeightsError(
            f"the receipt of {where} does not cover its workers",
            code="weights.missing",
            where=where,
            expected=f"replica {info.replica}, workers {list(range(info.workers))}",
            found=f"replica {receipt.replica}, workers {workers}",
        )
    for worker in receipt.workers:
        _verify_digests(f"{where}, worker {worker.worker}", worker.digests, sent)


def _verify_digests(where: str, loaded: Mapping[str, str], sent: Mapping[str, str]) -> None:
    missing = [name for name in sent if name not in loaded]
    unknown = [name for name in loaded if name not in sent]
    if missing or unknown:
        parts = [f"not loaded: {_some(missing)}"] * bool(missing) + [f"never sent: {_some(unknown)}"] * bool(unknown)
        raise WeightsError(
            f"{where} has not loaded the tensors that were sent; {'; '.join(parts)}",
            code="weights.missing",
            where=where,
            expected=f"{len(sent)} tensors",
            found=f"{len(loaded)} tensors",
        )
    different = [name for name, value in sent.items() if loaded[name] != value]
    if different:
        raise WeightsError(
            f"{where} has loaded other bytes than were sent: {_some(different)}",
            code="weights.digest",
            where=where,
            expected=sent[different[0]],
            found=loaded[different[0]],
        )


def _some(names: Sequence[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
