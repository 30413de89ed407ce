"""Weight sync: it brings a version to all replicas and verifies that they loaded it.

Digests prove the contents of a replica's parameters. Errors in packed copies, caches, kernels or numerics only show in
what it generates, so a further check may follow.
"""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import attrs

from jackfield.abc.checkpoint_engine import CheckpointEngine, ConnectRequest, Topology, TopologyRequest
from jackfield.abc.engine import Box
from jackfield.abc.rollout import ServerInfo, UpdateWeightsRequest, WeightReceipt
from jackfield.clock import Clock
from jackfield.errors import WeightsError, some
from jackfield.plugins.hooks import WeightsSynced
from jackfield.routing import Replica
from jackfield.sdk.buckets import digest
from jackfield.sdk.receiver import Blocks, delta_of
from jackfield.sdk.slices import Link, check_layouts, plan_links
from jackfield.weights.ends import GRACE_SECONDS, run_together
from jackfield.weights.links import LinkSender, connect_links, sent_over

if TYPE_CHECKING:
    import torch

__all__ = ["Replica", "WeightSender", "WeightSynchronizer", "WeightsSynced", "verify"]

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
class WeightSender(LinkSender):
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
        """Send all named tensors, by default those of the source; return digests by name, computed before or meanwhile.

        ``base`` is the version that every worker holds, to send only changes since then. None sends everything. Raise
        ``weights.missing`` if a name occurs twice, ``weights.transfer`` if there are no weights, and ``weights.base``
        if ``base`` is not :meth:`known <knows>`.
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
                    part = delta_of(name, tensor, self._sent[base].get(name), blocks[name], self._block_bytes)
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
        for sender in self._links.values():
            await sender.finalize()


@attrs.define(eq=False)
class WeightSynchronizer:
    """Sends weights from the trainer's ranks to all workers, and verifies their receipts."""

    senders: Sequence[WeightSender]  #: senders of the trainer's ranks in order, or their stubs
    replicas: Sequence[Replica]  #: all started replicas; read at the beginning of each sync
    name: str  #: plugin name of the checkpoint engine, from which each worker builds its receiver
    clock: Clock  #: time source for all waits and deadlines
    settings: Mapping[str, Any] = attrs.field(factory=dict)  #: settings of the checkpoint engine, for all ends
    deadline_seconds: float = 600.0  #: deadline of one transfer
    #: compares replicas that have loaded a version with the engine after a transfer
    check: Callable[[Sequence[Replica], int], Awaitable[None]] | None = None
    kind: Literal["full", "delta"] = "full"  #: delta: send changes since the last version that all acknowledged
    #: if that version is not held everywhere: "full" sends everything, "stop" raises ``weights.base``
    on_missing_base: Literal["full", "stop"] = "full"
    last: WeightsSynced | None = attrs.field(default=None, init=False)
    _layouts: list[tuple[Box, ...] | None] | None = attrs.field(default=None, init=False)  #: of senders, once known
    #: by replica, the number and the layouts of workers in the last transfer, and the links that follow from them
    _plan: tuple[list[Any], tuple[Link, ...]] = attrs.field(factory=lambda: ([], ()), init=False)

    @property
    def version(self) -> int | None:
        """The last version that every replica has acknowledged."""
        return None if self.last is None else self.last.version

    async def sync(self, version: int, some: Sequence[Replica] | None = None, *, last: bool = True) -> WeightsSynced:
        """Bring ``version`` to every replica, or to ``some`` in each call up to the last; repeat a transfer that fails.

        Raise ``weights.version`` if it is not newer than the last one, or a replica acknowledges another;
        ``weights.missing`` or ``weights.digest`` if tensors are missing or wrong (replica, worker and tensors are
        named); ``weights.transfer`` if an end fails (all are then finalized); ``weights.base`` if a delta cannot be
        applied; ``weights.log-probs`` if the probe finds a mismatch; ``DeadlineExceeded``, with the unfinished ends.
        """
        if self.version is not None and version <= self.version:
            message = "a weight version goes backwards"
            raise WeightsError(message, code="weights.version", expected=f"above {self.version}", found=version)
        report = await self._proved(list(self.replicas if some is None else some), version, delta=self.kind == "delta")
        self.last = report if last else self.last
        return report

    async def catch_up(self, replica: Replica, version: int) -> WeightsSynced:
        """Send all weights of ``version`` to a replica that was restarted or joins.

        The engine must not train during the transfer.
        """
        return await self._proved([replica], version, delta=False)

    async def _proved(
        self, replicas: Sequence[Replica], version: int, *, delta: bool, again: bool = True
    ) -> WeightsSynced:
        start = self.clock.time()
        base = await self._base(replicas) if delta else None
        try:
            try:
                links = await self._linked(replicas)
                report, sent = await self._transfer(replicas, version, base, links)
            finally:
                for rank, sender in enumerate(self.senders):
                    await self.clock.wait_for(sender.finalize(), GRACE_SECONDS, f"sender {rank} to finalize")
        except WeightsError as error:
            if error.code == "weights.base" and base is not None:
                self._without(error.message, error)
                return await self._proved(replicas, version, delta=False, again=again)
            if error.code != "weights.transfer" or not again:
                raise
            logging.getLogger("jackfield").warning("the transfer is repeated: %s", error.message)
            return await self._proved(replicas, version, delta=delta, again=False)
        first = 0
        for replica, receipt in zip(replicas, report.receipts, strict=True):
            verify(replica.info, receipt, version, sent[first : first + replica.info.workers])
            first += replica.info.workers
        if self.check is not None and replicas:
            await self.check(replicas, version)
        return attrs.evolve(report, seconds=self.clock.time() - start)

    async def _base(self, replicas: Sequence[Replica]) -> int | None:
        """Return the version that a delta can be based on, or None if everything has to be sent."""
        if self.version is None:
            return None
        lacking = [f"sender {rank}" for rank, each in enumerate(self.senders) if not await each.knows(self.version)]
        asked = asyncio.gather(*(replica.server.health() for replica in replicas))
        who = f"replicas to say which weights they hold, before version {self.version} is followed by another"
        reports = await self.clock.wait_for(asked, self.deadline_seconds, who)
        for replica, report in zip(replicas, reports, strict=True):
            if not report.healthy or report.weight_version != self.version:
                lacking.append(f"replica {replica.number}")
        if not lacking:
            return self.version
        self._without(f"{' and '.join(lacking)}: no weights of version {self.version}", None)
        return None

    def _without(self, why: str, error: WeightsError | None) -> None:
        """Allow a full transfer instead of a delta, or raise ``weights.base``."""
        if self.on_missing_base == "stop":
            expected, fix = f"version {self.version} at every sender and replica", "set weights.on_missing_base: full"
            message = f"a delta cannot be sent: {why}"
            raise WeightsError(message, code="weights.base", expected=expected, fix=fix) from error
        logging.getLogger("jackfield").info("weights are sent as a whole, not as a delta: %s", why)

    async def _linked(self, replicas: Sequence[Replica]) -> tuple[Link, ...]:
        """Return the links by which every rank sends workers their parts; empty: rank 0 sends whole tensors."""
        servers = [(replica.info.workers, replica.info.weight_layouts) for replica in replicas]
        if self._plan[0] == servers:
            return self._plan[1]
        layouts, ranks = [layout for _, own in servers for layout in own], list[tuple[Box, ...]]()
        several = len(self.senders) > 1 or len(set(layouts)) > 1  # else one link would have everything
        if several and self.kind != "delta" and len(layouts) == sum(workers for workers, _ in servers):
            self._layouts = self._layouts or [await sender.layout() for sender in self.senders]
            ranks = [layout for layout in self._layouts if layout is not None]
        for replica in replicas:
            check_layouts(replica.info, ranks)
        links = plan_links(ranks, layouts) if 0 < len(ranks) == len(self.senders) else ()
        for rank, sender in enumerate(self.senders if links else ()):
            await sender.open_links(tuple(link for link in links if link.rank == rank))
        self._plan = servers, links
        return links

    async def _transfer(
        self, replicas: Sequence[Replica], version: int, base: int | None, links: tuple[Link, ...]
    ) -> tuple[WeightsSynced, list[dict[str, str]]]:
        """Transfer a version; return the report, and by worker the digests of what was sent to it."""
        update = UpdateWeightsRequest(
            version=version,
            checkpoint_engine=self.name,
            checkpoint_engine_config=self.settings,
            total_workers=sum(replica.info.workers for replica in replicas),
            deltas_follow=self.kind == "delta",
            deadline_seconds=self.deadline_seconds,
        )
        sending: list[Coroutine[Any, Any, Any]]
        more: dict[str, Any] = {}
        if links:
            update = attrs.evolve(update, connect=await connect_links(self.senders, links, update.total_workers))
            sending = [sender.transfer_links(version) for sender in self.senders]
        else:
            topology, update = await self._prepare(update, base)
            places, more["retained"] = zip(self.senders, topology.trainer, strict=True), topology.retained
            sending = [sender.transfer(place, version, update.base_version) for sender, place in places]
        results = await self._run(sending, replicas, update)
        if links:
            own = results[: len(sending)]
            sent, more["link_bytes"] = sent_over(links, own, update.total_workers)
            digests, sent_bytes = dict(ChainMap(*sent)), sum(size for rank in own for _, size in rank)
        else:
            digests, sent_bytes = results[0]
            sent = [digests] * update.total_workers
        more |= {"digests": digests, "sent_bytes": sent_bytes, "kind": update.kind, "peft_config": update.peft_config}
        return WeightsSynced(version=version, receipts=tuple(results[len(sending) :]), **more), sent

    async def _prepare(self, update: UpdateWeightsRequest, base: int | None) -> tuple[Topology, UpdateWeightsRequest]:
        """Prepare a transfer from rank 0; return its topology and the replicas' request."""
        ends = {f"sender {rank}": sender.prepare() for rank, sender in enumerate(self.senders)}
        prepared = await run_together(ends, self.clock, self.deadline_seconds, f"weight version {update.version}")
        peft_config = prepared[0].peft_config
        kind: Literal["full", "adapter", "delta"] = "full" if base is None else "delta"
        if peft_config is not None:
            kind, base = "adapter", None  # an adapter is always sent in full
        metadata = tuple(each.metadata for each in prepared)
        request = TopologyRequest(trainer_metadata=metadata, rollout_workers=update.total_workers)
        topology = await self.senders[0].build_topology(request)
        fields: dict[str, Any] = {"kind": kind, "peft_config": peft_config, "base_version": base}
        return topology, attrs.evolve(update, connect=topology.rollout, **fields)

    async def _run(
        self, sending: Sequence[Coroutine[Any, Any, Any]], replicas: Sequence[Replica], update: UpdateWeightsRequest
    ) -> list[Any]:
        """Run senders and replicas; return their results in this order."""
        ends = {f"sender {rank}": each for rank, each in enumerate(sending)}
        first = 0
        for replica in replicas:
            connect = update.connect[first : first + replica.info.workers]
            own = attrs.evolve(update, connect=connect, first_worker=first)
            ends[f"replica {replica.number}"] = replica.server.update_weights(own)
            first += replica.info.workers
        return await run_together(ends, self.clock, self.deadline_seconds, f"weight version {update.version}")


def verify(info: ServerInfo, receipt: WeightReceipt, version: int, digests: Sequence[Mapping[str, str]]) -> None:
    """Refuse a receipt unless every worker loaded exactly what was sent to it; ``digests`` are by worker."""
    where = f"replica {info.replica}"

    def refuse(code: str, message: str, expected: Any, found: Any) -> None:
        raise WeightsError(f"{where} {message}", code=code, where=where, expected=expected, found=found)

    if receipt.version != version:
        refuse("weights.version", "acknowledges another version", version, receipt.version)
    wanted, workers = list(range(info.workers)), sorted(worker.worker for worker in receipt.workers)
    if receipt.replica != info.replica or workers != wanted:
        expected, found = f"{where}, workers {wanted}", f"replica {receipt.replica}, workers {workers}"
        refuse("weights.missing", "sent a receipt that does not cover its workers", expected, found)
    for worker in receipt.workers:
        where, loaded = f"replica {info.replica}, worker {worker.worker}", worker.digests
        sent = digests[worker.worker]
        missing = [name for name in sent if name not in loaded]
        unknown = [name for name in loaded if name not in sent]
        if missing or unknown:
            names = f"not loaded: {some(missing)}; never sent: {some(unknown)}"
            counts = f"{len(sent)} tensors", f"{len(loaded)} tensors"
            refuse("weights.missing", f"has not loaded the tensors that were sent; {names}", *counts)
        for name in (different := [name for name in sent if loaded[name] != sent[name]])[:1]:
            message = f"has loaded other bytes than were sent: {some(different)}"
            refuse("weights.digest", message, sent[name], loaded[name])
