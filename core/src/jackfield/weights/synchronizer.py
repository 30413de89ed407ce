"""One synchronisation: a version of the weights to all replicas, with proof."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from jackfield.abc.checkpoint_engine import TopologyRequest
from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, UpdateWeightsRequest, WeightReceipt
from jackfield.clock import Clock
from jackfield.errors import WeightsError
from jackfield.weights.probe import ReplicaProbe
from jackfield.weights.sender import WeightSender
from jackfield.weights.together import GRACE_SECONDS, run_together

Kind: TypeAlias = Literal["full", "adapter", "delta"]

_SHOWN = 4  #: names in a message


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
    digests: Mapping[str, str] = attrs.field(factory=dict)  #: of all tensors, sent or left as they were, by name
    peft_config: Mapping[str, Any] | None = None
    retained: Mapping[str, Any] | None = None  #: connect arguments of any worker that comes later; None: in vain


class WeightSynchronizer:
    """Moves weights from the trainer's ranks to all inference workers, and believes nothing but their receipts."""

    def __init__(
        self,
        senders: Sequence[WeightSender],
        replicas: Sequence[Replica],
        name: str,
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
            senders: One for each trainer rank, in order; or their stubs.
            replicas: All of them, started. The list is read at the beginning of each synchronisation.
            name: The checkpoint engine's plugin, by which each worker builds its receiver.
            clock: Time source for all waits and deadlines.
            settings: Those of the checkpoint engine; workers get the same.
            deadline_seconds: The longest time of one transfer.
            probe: Compares what replicas compute with what the engine computes, at the end of each synchronisation;
                None: that is left out, or done elsewhere.
            kind: delta: send what has changed since the last version that every replica acknowledged.
            on_missing_base: Where that version is not held everywhere; full: send everything, stop: ``weights.base``.
        """
        self._senders, self._replicas, self._name = senders, replicas, name
        self._clock, self._deadline_seconds = clock, deadline_seconds
        self._settings = dict(settings or {})
        self._probe, self._kind, self._on_missing_base = probe, kind, on_missing_base
        self.last: SyncReport | None = None  #: of the last version that every replica has acknowledged

    @property
    def version(self) -> int | None:
        """The last version that every replica has acknowledged."""
        return None if self.last is None else self.last.version

    async def sync(self, version: int) -> SyncReport:
        """Bring ``version`` to every replica. A transfer that breaks off is repeated once.

        Raises:
            WeightsError: ``weights.version`` when it is not newer than the last one or a replica acknowledges another;
                ``weights.missing`` or ``weights.digest`` naming replica, worker and tensors; ``weights.transfer`` when
                an end fails, and the others are then cancelled; ``weights.base``; ``weights.log-probs``. Every end is
                finalized.
            DeadlineExceeded: names the ends that had not finished.
        """
        if self.version is not None and version <= self.version:
            message = "a weight version goes backwards"
            raise WeightsError(message, code="weights.version", expected=f"above {self.version}", found=version)
        self.last = await self._repeated(list(self._replicas), version, self._kind == "delta")
        return self.last

    async def catch_up(self, replica: Replica, version: int) -> SyncReport:
        """Bring the engine's weights, whole, to one replica that was restarted or joins.

        Args:
            replica: A started replica.
            version: The version of the weights that the engine has; it must not train meanwhile.
        """
        return await self._repeated([replica], version, delta=False)

    async def _repeated(self, replicas: Sequence[Replica], version: int, delta: bool) -> SyncReport:
        try:
            return await self._proved(replicas, version, delta)
        except WeightsError as error:
            if error.code != "weights.transfer":
                raise
            logging.getLogger("jackfield").warning("the transfer is repeated: %s", error.message)
            return await self._proved(replicas, version, delta)

    async def _proved(self, replicas: Sequence[Replica], version: int, delta: bool) -> SyncReport:
        """Transfer, whole where a delta cannot be applied, and verify the receipts."""
        start = self._clock.time()
        base = await self._base(replicas) if delta else None
        try:
            report = await self._transfer(replicas, version, base)
        except WeightsError as error:
            if base is None or error.code != "weights.base":
                raise
            self._without(error.message, error)
            report = await self._transfer(replicas, version, None)
        for replica, receipt in zip(replicas, report.receipts, strict=True):
            verify(replica.info, receipt, version, report.digests)
        if self._probe is not None and replicas:
            await self._probe.check({each.info.replica: each.server for each in replicas}, version)
        return attrs.evolve(report, seconds=self._clock.time() - start)

    async def _base(self, replicas: Sequence[Replica]) -> int | None:
        """Return the version that a delta can be made to; None: everything has to be sent.

        Raises:
            WeightsError: ``weights.base``, where that is to stop the run.
        """
        if self.version is None:
            return None
        lacking = [f"sender {rank}" for rank, each in enumerate(self._senders) if not await each.knows(self.version)]
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
        """Go on with a whole transfer, or stop."""
        if self._on_missing_base == "stop":
            raise WeightsError(
                f"a delta cannot be sent: {why}",
                code="weights.base",
                expected=f"version {self.version} at every sender and replica",
                fix="weights.on_missing_base: full sends everything instead",
            ) from error
        logging.getLogger("jackfield").info("weights are sent as a whole, not as a delta: %s", why)

    async def _transfer(self, replicas: Sequence[Replica], version: int, base: int | None) -> SyncReport:
        try:
            return await self._transferred(replicas, version, base)
        finally:
            for rank, sender in enumerate(self._senders):
                await self._clock.wait_for(sender.finalize(), GRACE_SECONDS, f"sender {rank} to finalize")

    async def _transferred(self, replicas: Sequence[Replica], version: int, base: int | None) -> SyncReport:
        prepared = [await sender.prepare() for sender in self._senders]
        peft_config = prepared[0].peft_config
        base = base if peft_config is None else None  # an adapter is sent whole
        kind: Kind = "adapter" if peft_config is not None else "full" if base is None else "delta"
        metadata, workers = tuple(each.metadata for each in prepared), sum(replica.info.workers for replica in replicas)
        request = TopologyRequest(trainer_metadata=metadata, rollout_workers=workers)
        topology = await self._senders[0].build_topology(request)
        ends: dict[str, Coroutine[Any, Any, Any]] = {
            f"sender {rank}": _send(sender, topology.trainer[rank], version, base)
            for rank, sender in enumerate(self._senders)
        }
        first = 0
        for replica in replicas:
            update = UpdateWeightsRequest(
                version=version,
                checkpoint_engine=self._name,
                checkpoint_engine_config=self._settings,
                connect=topology.rollout[first : first + replica.info.workers],
                first_worker=first,
                total_workers=workers,
                kind=kind,
                peft_config=peft_config,
                base_version=base,
                deltas_follow=self._kind == "delta",
                deadline_seconds=self._deadline_seconds,
            )
            ends[f"replica {replica.info.replica}"] = replica.server.update_weights(update)
            first += replica.info.workers
        results = await run_together(ends, self._clock, self._deadline_seconds, f"weight version {version}")
        digests, sent_bytes = results[0]
        receipts: tuple[WeightReceipt, ...] = tuple(results[len(self._senders) :])
        return SyncReport(
            version=version,
            receipts=receipts,
            seconds=0.0,
            paused_seconds=max((receipt.paused_seconds for receipt in receipts), default=0.0),
            bytes=sent_bytes,
            kind=kind,
            digests=digests,
            peft_config=peft_config,
            retained=topology.retained,
        )


async def _send(
    sender: WeightSender, arguments: Mapping[str, Any], version: int, base: int | None
) -> tuple[dict[str, str], int]:
    await sender.connect(arguments, version)
    return await sender.send_version(base)


def verify(info: ServerInfo, receipt: WeightReceipt, version: int, sent: Mapping[str, str]) -> None:
    """Refuse a receipt that does not prove that every worker has loaded just what was sent."""
    where = f"replica {info.replica}"
    if receipt.version != version:
        message = f"{where} acknowledges another version"
        raise WeightsError(message, code="weights.version", where=where, expected=version, found=receipt.version)
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
