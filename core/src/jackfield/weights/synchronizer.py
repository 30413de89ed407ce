"""One synchronisation: a version of the weights to all replicas, with proof."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import attrs

from jackfield.abc.checkpoint_engine import PrepareResult, Topology, TopologyRequest
from jackfield.abc.rollout import BaseRolloutServer, ServerInfo, UpdateWeightsRequest, WeightReceipt
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WeightsError
from jackfield.weights.canary import Canary

__all__ = ["Replica", "Sender", "SyncReport", "Topologist", "WeightSynchronizer"]

T = TypeVar("T")

_SHOWN = 4  #: names in a message
_CAUSE_SECONDS = 1.0  #: after a transfer broke off, for the side that did it to say why
_GRACE_SECONDS = 10.0  #: for a cancelled side to end


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

    async def send(self) -> dict[str, str]:
        """Send the weights; digests by name."""
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
    bytes: int  #: of the weights, once


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
        canary: Canary | None = None,
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
            canary: compares what replicas compute with what the engine computes, at the end of each
                synchronisation; None: nobody does, or somebody else.
        """
        self._senders = list(senders)
        self._replicas = replicas
        self._name = name
        self._engine_class = engine_class
        self._clock = clock
        self._settings = dict(settings or {})
        self._deadline_seconds = deadline_seconds
        self._canary = canary
        self.version: int | None = None  #: the last one that every replica has acknowledged

    async def sync(self, version: int) -> SyncReport:
        """Bring ``version`` to every replica.

        Raises:
            WeightsError: ``weights.version`` when it is not newer than the last one or a replica acknowledges another;
                ``weights.missing`` or ``weights.digest`` naming replica, worker and tensors; ``weights.transfer`` when
                a side fails, and the other sides are then cancelled; ``weights.canary``. Every end is finalized.
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
        try:
            digests, receipts = await self._transfer(replicas, version)
        finally:
            await self._finalize()
        for replica, receipt in zip(replicas, receipts, strict=True):
            _verify(replica.info, receipt, version, digests)
        if self._canary is not None:
            await self._canary.check({each.info.replica: each.server for each in replicas}, version)
        self.version = version
        return SyncReport(
            version=version,
            receipts=tuple(receipts),
            seconds=self._clock.time() - start,
            paused_seconds=max((receipt.paused_seconds for receipt in receipts), default=0.0),
            bytes=self._senders[0].sent_bytes,
        )

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
            canary=self._canary,
        )
        return await alone.sync(version)

    async def _transfer(self, replicas: Sequence[Replica], version: int) -> tuple[dict[str, str], list[WeightReceipt]]:
        """What was sent, by name, and each replica's receipt."""
        peft_configs = [await _result(sender.open()) for sender in self._senders]
        prepared = [await _result(sender.prepare()) for sender in self._senders]
        workers = sum(replica.info.workers for replica in replicas)
        metadata = tuple(result.metadata for result in prepared)
        request = TopologyRequest(trainer_metadata=metadata, rollout_workers=workers)
        topology: Topology = await _result(self._engine_class.build_topology(request))
        sides: dict[str, Coroutine[Any, Any, Any]] = {
            f"sender {rank}": self._send(sender, topology.trainer[rank], version)
            for rank, sender in enumerate(self._senders)
        }
        for replica, update in self._requests(replicas, topology, version, peft_configs[0]):
            sides[f"replica {replica.info.replica}"] = replica.server.update_weights(update)
        results = await _all(sides, self._clock, self._deadline_seconds, f"weight version {version}")
        senders = len(self._senders)
        return results[0], results[senders:]

    @staticmethod
    async def _send(sender: Sender, arguments: Mapping[str, Any], version: int) -> dict[str, str]:
        await sender.connect(arguments, version)
        return await sender.send()

    def _requests(
        self,
        replicas: Sequence[Replica],
        topology: Topology,
        version: int,
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
                kind="full" if peft_config is None else "adapter",
                peft_config=peft_config,
                deadline_seconds=self._deadline_seconds,
            )
            requests.append((replica, request))
            first += replica.info.workers
        return requests

    async def _finalize(self) -> None:
        for rank, sender in enumerate(self._senders):
            await self._clock.wait_for(sender.finalize(), _GRACE_SECONDS, f"sender {rank} to finalize")


async def _result(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


async def _all(sides: Mapping[str, Coroutine[Any, Any, Any]], clock: Clock, seconds: float, what: str) -> list[Any]:
    """Run all sides to their end; when one fails or time runs out, end the others and say who it was."""
    tasks = {asyncio.ensure_future(side): name for name, side in sides.items()}
    ended: list[asyncio.Task[Any]] = []  # in order: what fails first is the cause, the rest are consequences
    for task in tasks:
        task.add_done_callback(ended.append)
    try:
        await clock.wait_for(asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION), seconds, what)
    except DeadlineExceeded:
        late = [name for task, name in tasks.items() if not task.done()]
        stuck = await _cancel(tasks, clock)
        raise DeadlineExceeded(
            f"waited {seconds:.6g} s for {what}; not finished: {', '.join(late)}" + stuck,
            fix="look at why they did not answer, or raise the deadline of the sync",
        ) from None
    except BaseException:
        await _cancel(tasks, clock)
        raise
    failed = [task for task in ended if task.cancelled() or task.exception() is not None]
    if failed:
        cause = await _cause(failed, ended, tasks, clock)
        stuck = await _cancel(tasks, clock)
        error = None if cause.cancelled() else cause.exception()
        raise _failure(tasks[cause], error, what, stuck) from error
    return [task.result() for task in tasks]


async def _cause(
    failed: Sequence[asyncio.Task[Any]],
    ended: Sequence[asyncio.Task[Any]],
    tasks: Mapping[asyncio.Task[Any], str],
    clock: Clock,
) -> asyncio.Task[Any]:
    """The side that failed by itself. A peer may learn of a break before the side that broke it off has ended."""

    def broken_off(task: asyncio.Task[Any]) -> bool:
        error = None if task.cancelled() else task.exception()
        return isinstance(error, WeightsError) and error.code == "weights.transfer"

    running = [task for task in tasks if not task.done()]
    if running and all(map(broken_off, failed)):
        with suppress(DeadlineExceeded):
            await clock.wait_for(asyncio.wait(running), _CAUSE_SECONDS, "the side that broke off")
    late = [task for task in tasks if task.done() and task not in ended]  # so lately that no callback has run yet
    candidates = [task for task in (*ended, *late) if task.cancelled() or task.exception() is not None]
    return next((task for task in candidates if not broken_off(task)), candidates[0])


async def _cancel(tasks: Mapping[asyncio.Task[Any], str], clock: Clock) -> str:
    """End what still runs; names who does not end."""
    running = [task for task in tasks if not task.done()]
    for task in running:
        task.cancel()
    if running:
        try:
            await clock.wait_for(asyncio.wait(running), _GRACE_SECONDS, "cancelled sides")
        except DeadlineExceeded:
            return f" (and {', '.join(tasks[task] for task in running if not task.done())} cannot be cancelled)"
    for task in running:
        if not task.cancelled():
            task.exception()  # it is told below, if it came first; otherwise it is a consequence
    return ""


def _failure(name: str, error: BaseException | None, what: str, stuck: str) -> JackfieldError:
    code = error.code if isinstance(error, WeightsError | DeadlineExceeded) else "weights.transfer"
    text = "was cancelled" if error is None else error.message if isinstance(error, JackfieldError) else repr(error)
    kind = DeadlineExceeded if isinstance(error, DeadlineExceeded) else WeightsError
    details = {key: getattr(error, key, None) for key in ("expected", "found", "fix")}
    return kind(f"{name} failed while {what} was synchronised: {text}{stuck}", code=code, where=name, **details)


def _verify(info: ServerInfo, receipt: WeightReceipt, version: int, sent: Mapping[str, str]) -> None:
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
