"""The TransferQueue, the interface for producers and consumers, and its server and client for other processes."""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from jackfield.abc.transfer_queue import DeleteRequest, KeysRequest, SnapshotRequest, TransferQueueBackend
from jackfield.clock import Clock
from jackfield.errors import QueueError, RpcError, some
from jackfield.queue.groups import Groups
from jackfield.queue.labels import label_samples
from jackfield.queue.leases import Leases
from jackfield.queue.meta import Notice, group_of
from jackfield.queue.records import State
from jackfield.queue.store import STORE_FILE, VALUES_FOLDER, Controller, Store, read_checkpoint, uses
from jackfield.sdk.rpc import Address, Connection, Contract, Server, Service, caller, connect, stub
from jackfield.sdk.rpc.wire import Goodbye

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., Any])
_SERVICE, _SERVER = "queue", "the queue's controller"


def mutates(method: F) -> F:
    """Decorate a method that changes the queue: store its changes before it returns, and wake all waiters."""

    @functools.wraps(method)
    async def called(self: TransferQueue, *args: Any, **kwargs: Any) -> Any:
        self._core.require_open()
        try:
            return await method(self, *args, **kwargs)
        finally:
            self._core.wake()
            self._core.store.write(self._core.state)

    return cast(F, called)


def _of(part: str, method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """Return a method of the queue that calls a method of one of its parts."""

    @functools.wraps(method)
    def called(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return method(getattr(self, part), *args, **kwargs)

    made = called if inspect.isasyncgenfunction(method) else mutates(called)
    return cast(Callable[Concatenate[Any, P], R], made)


class TransferQueue:
    """A table of samples × columns in groups and batches that are consumed exactly once.

    It holds metadata only: values go directly to a backend (:class:`~jackfield.queue.values.Values`).
    :mod:`jackfield.queue` describes groups, consumers and backpressure. All methods must be called on one event loop.

    Raises (all methods): ``DeadlineExceeded`` if a wait ends at its deadline; it names the groups, rollouts, columns or
    consumers that are missing. ``queue.lease`` under a lease that has ended; then nothing has
    changed. ``QueueError``: ``queue.closed``, ``queue.unknown-sample``, ``queue.unknown-consumer``,
    ``queue.batch-failed`` for a batch in which a group was retried too often, and ``queue.store``.
    """

    claim_batch = _of("_groups", Groups.claim_batch)
    end_holder = _of("_groups", Groups.end_holder)
    groups_to_fill = _of("_groups", Groups.groups_to_fill)
    open_groups = _of("_groups", Groups.open_groups)
    end_rollouts = _of("_groups", Groups.end_rollouts)
    new_samples = _of("_groups", Groups.new_samples)
    drop_groups = _of("_groups", Groups.drop_groups)
    fail_samples = _of("_groups", Groups.fail_samples)
    fail_lost = _of("_groups", Groups.fail_lost)
    add_columns = _of("_groups", Groups.add_columns)
    register_consumer = _of("_leases", Leases.register_consumer)
    lease = _of("_leases", Leases.lease)
    release = _of("_leases", Leases.release)
    take_over = _of("_leases", Leases.take_over)
    ack = _of("_leases", Leases.ack)
    commit = _of("_leases", Leases.commit)

    def __init__(
        self,
        backend: TransferQueueBackend,
        clock: Clock,
        *,
        store: Path | None = None,
        durable: bool = False,
        max_samples: int | None = None,
        max_bytes: int | None = None,
        max_retries: int = 8,
        minimum_rows: int | None = None,
        archive: Any = None,
    ) -> None:
        """Create a queue, whose values are in ``backend``, and its ledger and state in the file ``store`` or in memory.

        ``durable`` saves the state at every call. Producers wait at ``max_samples`` samples or ``max_bytes`` bytes. The
        batch fails after ``max_retries`` retries of one index. A group is complete with samples of ``minimum_rows`` of
        its rollouts, or of all. An ``archive`` gets samples before they are deleted.
        """
        self.backend, self.clock = backend, clock
        self.caller: Callable[[], str | None] = lambda: None  #: the calling client
        self.server: QueueServer | None = None
        kept = Store(store, durable=durable and store is not None)
        self._core = Controller(backend, clock, kept, lambda: self.caller())
        self._leases = Leases(self._core, archive)
        self._groups = Groups(self._core, self._leases, max_samples, max_bytes, max_retries, minimum_rows)
        self._notices: dict[str, Notice] = {}

    async def start(self) -> None:
        """Start the backend and the background deletion of unneeded values."""
        if self._leases.archive is not None:
            self._leases.archive.open(self._core.store.end)
        await self.backend.start()
        self._core.deletion = asyncio.create_task(self._delete())

    async def close(self) -> None:
        """End every wait with ``queue.closed`` and close the store and the backend. Idempotent."""
        deletion, self._core.deletion = self._core.deletion, None
        self._core.wake()
        if deletion is not None:
            deletion.cancel()
            await asyncio.gather(deletion, return_exceptions=True)
        self._core.store.close()
        await self.backend.close()

    @property
    def ledger(self) -> list[dict[str, Any]]:
        """Acks, commits, rollbacks, expiries, retirements, derivations, drops, releases, losses and archived files."""
        return [*self._core.store.entries(), *self._core.store.coming]

    async def drain_failures(self) -> dict[str, str]:
        """Return the samples, and rollouts without one, that failed since the last call, with reasons."""
        failures, self._core.failures = self._core.failures, {}
        return failures

    async def drain_metrics(self) -> dict[str, float]:
        """Return what has passed since the last call.

        ``waits/CONSUMER/rollouts`` and ``waits/CONSUMER/columns`` are the seconds that leases waited for groups to be
        made, and then for columns such as the reward. ``generated/samples`` and ``generated/response_tokens/mean`` are
        of the rollouts that ended, whether they are used or not.
        """
        found = dict(self._core.metrics)
        self._core.metrics.clear()
        if count := found.get("generated/samples"):
            found["generated/response_tokens/mean"] = found.pop("generated/response_tokens") / count
        return found

    async def stats(self) -> dict[str, int]:
        """Return the numbers of samples and bytes, of open batches, and of groups that exist or are not made yet."""
        state = self._core.state
        return {
            "samples": state.samples,
            "bytes": state.bytes,
            "batches": len(state.batches()),
            "groups": len(state.groups),
            "groups_open": sum(not group.is_made for group in state.groups.values()),
            "samples_leased": sum(len(group.samples) for each in state.consumers.values() for group in each.held),
            **({} if self.server is None else {"clients": len(self.server.clients), "refused": self.server.refused}),
        }

    @mutates
    async def post(self, topic: str, value: Mapping[str, Any]) -> None:
        """Post a topic's newest value, of plain values. It is lost when the controller ends."""
        before = self._notices.get(topic)
        self._notices[topic] = Notice(1 if before is None else before.number + 1, dict(value))

    async def wait_notice(self, topic: str, after: int, deadline_seconds: float) -> Notice:
        """Wait until a topic's newest notice has a number above ``after`` and return it; the first is 1."""
        until = self._core.clock.time() + deadline_seconds
        self._core.require_open()
        while (notice := self._notices.get(topic)) is None or notice.number <= after:
            await self._core.wait(until, lambda: f"a post of {topic!r}")
        return notice

    async def _delete(self) -> None:
        """Delete values in the background. The next call raises a failure, which only leaves unneeded values."""
        while True:
            while not self._core.discarded:
                await self._core.change.wait()
            async with self._leases.deleting:
                await self._forget_discarded()

    async def _forget_discarded(self) -> None:
        """Delete values that no consumer needs. The caller holds the lock."""
        self._core.store.write(self._core.state)  # store first that they are not needed
        discarded, self._core.discarded = self._core.discarded, {}
        for partition, keys in discarded.items():
            await self.backend.delete(DeleteRequest(partition=partition, keys=tuple(dict.fromkeys(keys))))

    async def flush(self) -> int:
        """Delete all values that do not belong to a sample of the queue; return how many samples the queue never had.

        These are the samples of workers that died before their report.
        """
        self._core.require_open()
        found = 0
        async with self._leases.deleting:
            kept = {sample.key for some, *_ in self._leases.rejected for sample in some}
            for partition, key in (await self.backend.keys(KeysRequest())).samples:
                group = self._core.state.groups.get(group_of(key))
                if not (self._core.state.knows(key) or key in kept) and (group is None or group.is_made):
                    self._core.discard([key], partition)
                    found += 1
            await self._forget_discarded()
        return found

    @mutates
    async def checkpoint(self, folder: str | Path, again_from: Mapping[str, int] | None = None) -> None:
        """Write a consistent copy of state and values. Producers continue; deletions wait.

        ``again_from`` has, by partition, the first batch that is saved as not yet begun. A durable queue ignores it
        and saves all batches as they are.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        again_from = None if self._core.store.durable else again_from
        async with self._leases.deleting:
            while True:
                await self.fail_lost()
                state = self._core.state
                state.mark(self._core.store.end)
                self._core.store.write(state)
                rows, keys = list(state.rows(again_from)), list(state.keys())  # of this moment
                try:
                    await self.backend.checkpoint(SnapshotRequest(folder=str(folder / VALUES_FOLDER)))
                    break
                except QueueError as error:
                    named = [str(key) for key in error.found] if isinstance(error.found, list | tuple) else []
                    if error.code != "queue.lost" or len(await self.fail_lost(keys=named)) < len(named):
                        raise  # a consumer has leased them
                    await self._forget_discarded()  # try again with the rest
        self._core.store.save(folder / STORE_FILE, rows, keys)
        self._core.store.sync()
        await self.flush()

    @mutates
    async def restore(self, folder: str | Path, step: int | None = None) -> bool:
        """Restore a checkpoint, or keep a newer state that followed it. The ledger records the revoked acks.

        A newer state is kept if the queue is still alive, or if state and backend are durable and no sample of the
        checkpoint is lost. It is as the last call left it, except that leases have ended, open groups are generated
        again and acks of steps after ``step`` are revoked. ``step`` is the checkpoint's last step, whose acks are
        final; with None the checkpoint is restored unchanged. The samplers' state is always the checkpoint's.

        Return whether a newer state was kept. A damaged checkpoint raises ``queue.invalid``, and a ledger that does not
        match it ``queue.ledger``.
        """
        saved, lineage = read_checkpoint(Path(folder) / STORE_FILE)
        end = None if self._core.store.end is None else saved.ledger
        if end is not None:
            self._core.store.check(end, cut=True)
        async with self._leases.deleting:
            newer = None if step is None else await self._newer(saved, step)
            if newer is None:
                if self._leases.archive is not None:
                    self._leases.archive.open(end)
                await self.backend.restore(SnapshotRequest(folder=str(Path(folder) / VALUES_FOLDER)))
            if newer is self._core.state:  # a trainer died, and this process is alive
                self._leases.end(lambda consumer, hold: True)
            else:
                self._replace(newer or saved)
            for name, sampler in saved.samplers.items():
                if sampler and name in self._core.state.consumers:
                    self._core.state.consumers[name].sampler.load_state_dict(sampler)
            if end is not None:  # the ledger revokes acks of steps after `step`, or all after the checkpoint
                last = step if newer else None
                for name, keys in uses(self._core.store.entries(end.number if last is None else 0)).items():
                    acks = [(key, each) for key, steps in keys.items() for each in steps]
                    void = [key for key, each in acks if last is None or (each is not None and each > last)]
                    if void:
                        self._core.record("rollback", consumer=name, step=last, keys=void)
            if step is not None:
                self._leases.take_back(step)
            self._core.store.derived.update(lineage)
            self._core.store.write(self._core.state, begin=True)
        if step is not None:
            await self._leases.commit(step)
        await self.fail_lost()
        await self.flush()
        return newer is not None

    async def _newer(self, saved: State, step: int) -> State | None:
        """Return a newer state that can roll back to ``step`` and has all samples of the checkpoint, or None.

        It is the living queue's or an earlier process's. Without the checkpoint's mark, another run or the same run
        without a durable queue wrote the state.
        """
        mark, known, state = saved.marks[-1], saved.keys(), self._core.state
        try:
            if mark not in state.marks and self._core.store.durable:
                state = State.load(rows) if (rows := self._core.store.rows()) else State()
        except QueueError as error:
            if error.code != "queue.invalid":
                raise
            message = "the queue's saved state is damaged (%s): what was made since the checkpoint is made again"
            logging.getLogger("jackfield").warning(message, error)
        if mark not in state.marks or state.committed > step:
            return None
        if not (lost := await self._leases.lost(state) & known):
            return state
        groups = sorted(group.name for group in state.groups.values() if not known >= group.samples.keys())
        logging.getLogger("jackfield").warning(
            "%d samples are gone from the queue's store (%s): the queue goes on with the samples of its checkpoint, "
            "and what was made since is made again: %s",
            *(len(lost), some(sorted(lost)), f"groups {some(groups)}" if groups else "nothing"),
        )
        return None

    def _replace(self, state: State) -> None:
        """Replace the state but keep the consumers' registrations, and end clients that used the state before."""
        clients = {client for batch in self._core.state.batches() for client in batch.explorers.values()}
        for consumer in self._core.state.consumers.values():
            if (before := state.consumers.get(consumer.name)) is not None:
                consumer.epoch = max(consumer.epoch, before.epoch)
            consumer.usable, consumer.held = {}, {}
            state.add_consumer(consumer)
        self._core.state = state
        self._core.discarded.clear()
        self._leases.rejected.clear()
        for consumer in state.consumers.values():
            consumer.offer_all()
        for batch in state.batches():
            batch.moved = self._core.moved = self._core.clock.time()
            if batch.failure is None and (vacant := [group.index for group in batch.vacant()]):
                where = {"partition": batch.partition.name, "batch": batch.number}
                self._core.record("release", **where, groups=vacant, reason="the queue was restored")
        reason = "has made the queue another one; what was begun before is in vain"
        for client in [] if self.server is None else list(self.server.clients.values()):
            if (client.session in clients or client.iterations) and client.session != self.caller():
                client.send(Goodbye(reason))
                client.end(reason)

    @mutates
    async def label(self, numbers: Mapping[str, Mapping[str, float]], by: str, version: int) -> tuple[str, ...]:
        """Add late labels to the tags of samples, as ``reward/NAME``; return the keys of those that are here."""
        return label_samples(self._core, numbers, by, version)

    @mutates
    async def clear(self) -> None:
        """Delete everything, including the ledger and what a durable backend kept from an earlier run."""
        self._core.store.clear()
        if self._leases.archive is not None:
            self._leases.archive.open(None)
        before = self._core.state.samples or any(each.next_batch for each in self._core.state.partitions.values())
        self._replace(State())
        found = await self.flush()
        if found or before:
            self._core.record("clear", samples=found)
        self._core.store.write(self._core.state, begin=True)


QUEUE = Contract(TransferQueue, without={"start", "close", "end_holder"}, undo={"lease": "release"})


class QueueServer(Server):
    """A server of a queue. A client's leases, batches and iterations end with its connection."""

    def __init__(self, queue: TransferQueue, clock: Clock, heartbeat_seconds: float) -> None:
        """Create a server that is not listening. A client without a heartbeat for so long is dead."""
        service, end = {_SERVICE: Service(target=queue, contract=QUEUE)}, queue.end_holder
        super().__init__(_SERVER, service, clock, heartbeat_seconds, lambda gone, _: end(gone.session, gone.name))
        queue.caller = lambda: caller().session
        queue.server = self

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen for clients; raise ``queue.store`` if the address is in use, or is not one of this machine."""
        try:
            return await super().listen(host, port)
        except RpcError as error:
            raise QueueError(error.message, code="queue.store", where=error.where, fix=error.fix) from error


async def connect_queue(file: Path, name: str, clock: Clock) -> tuple[TransferQueue, Connection]:
    """Connect to a served queue. Waits end at the deadlines of their calls or with the connection.

    ``file`` is the server's address file, ``name`` the name of this process for the server's messages. The caller must
    close the connection that is returned with the queue. If the file is missing, raise ``queue.unreachable``; if no
    controller answers, ``queue.session``.
    """
    try:
        address = Address.read(file)
    except RpcError as error:
        message, fix = "no controller of a queue is served there", "start `jackfield queue serve` first"
        raise QueueError(message, code="queue.unreachable", where=str(file), found=error.found, fix=fix) from error

    def lost(reason: str) -> QueueError:
        message = f"the connection to {_SERVER} is lost: it {reason}"
        fix = "start this process again, once `jackfield queue serve` runs"
        return QueueError(message, code="queue.session", where=str(address.process), fix=fix)

    connection = await connect(address, name, clock, {_SERVICE: QUEUE}, lost_error=lost)
    return stub(connection, _SERVICE, QUEUE, TransferQueue, math.inf), connection
