"""The replica pool: starts replicas, routes to them, restarts them with weights, adds and removes them."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Protocol

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.cluster.replica import Replica, ReplicaState, State, Worker
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, JackfieldError, RolloutError, RunError, WorkerLost
from jackfield.weights import Replica as Receiver
from jackfield.weights import SyncReport

_STOP_SECONDS = 60.0
_LOG = logging.getLogger("jackfield")


class Places(Protocol):
    """Where replicas live: in this process, in processes of their own, or in a cluster."""

    async def start(self, number: int) -> Worker:
        """Make a replica's server; another one, where the replica has died. The server is not started.

        Raises:
            JackfieldError: There is no room, or it does not come; nothing of a new replica is left.
        """

    async def end(self, number: int) -> None:
        """Give up the process and the place of a replica that has been stopped."""

    async def route(self, replicas: Mapping[int, Replica], seconds: float) -> int:
        """Tell all agents which replicas serve: :meth:`jackfield.routing.router.Router.route`."""


@attrs.frozen(kw_only=True)
class WeightSource:
    """Where replicas get the engine's weights."""

    load: Callable[[Receiver], Awaitable[None]]  #: brings them to one replica, with a receipt, while they are held
    #: keeps the engine from training and everybody from synchronising, and gives replicas the device
    hold: Callable[[], AbstractAsyncContextManager[None]]
    sync: Callable[[int], Awaitable[SyncReport]] | None = None  #: brings a version to all members; None: others do
    takes_turns: bool = False  #: whether the engine leaves the device before a replica may start
    posts: bool = False  #: whether a version is for replicas of other processes, too


@attrs.define(eq=False)
class ReplicaPool:
    """Owns the replicas of a run.

    Weights go to :attr:`members`. Requests go to the replicas in the agents' routing tables: those that have
    acknowledged the engine's weights. A replica that is removed gets no requests, ends those that it had, and is a
    member up to then.
    """

    _places: Places
    _config: RunConfig
    _clock: Clock
    source: WeightSource | None = attrs.field(default=None, init=False)  #: None: the run has not begun
    replicas: dict[int, Replica] = attrs.field(factory=dict, init=False)
    members: list[Receiver] = attrs.field(factory=list, init=False)  #: by number: those that get every version
    _scaling: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _tasks: asyncio.TaskGroup | None = attrs.field(default=None, init=False)
    _scalings: set[asyncio.Task[list[ReplicaState]]] = attrs.field(factory=set, init=False)

    # -- the run's beginning and end

    async def start(self, count: int) -> None:
        """Start the first replicas, in order; they have the weights of the model's folder."""
        for number in range(count):
            await self._begin(self._new(number))
            self._set(self.replicas[number], "serving")
        await self._route()

    async def keep(self) -> None:
        """Restart replicas that die, until cancelled.

        Raises:
            JackfieldError: In a group: a replica has died too often.
        """
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for replica in self.replicas.values():
                    self._watch(replica)
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    async def close(self) -> None:
        """Give up what :meth:`scale` does, and stop all replicas; :class:`Places` ends their processes."""
        for scaling in self._scalings:
            scaling.cancel()
        await asyncio.gather(*self._scalings, return_exceptions=True)
        self.members.clear()
        while self.replicas:
            replica = self.replicas.pop(max(self.replicas))
            if hasattr(replica, "worker"):
                await self._stop(replica)

    # -- while the run goes on

    async def sync(self, version: int) -> SyncReport:
        """Bring a version to all members; again without those that die meanwhile, which load it when they are back.

        Raises:
            JackfieldError: What failed although every member lives.
        """
        source = self._connected()
        assert source.sync is not None, "this process has the engine"
        while self.members or source.posts:
            workers = [(each, each.worker) for each in self.replicas.values() if each.state != "starting"]
            try:
                return await source.sync(version)
            except JackfieldError:
                if not await self._remove_lost(workers):
                    raise
        return SyncReport(version=version, receipts=(), seconds=0.0, paused_seconds=0.0, bytes=0)

    async def each(self, call: Callable[[BaseRolloutServer], Awaitable[object]]) -> None:
        """Call every member; those that have died are left out.

        Raises:
            Exception: What a living replica raised.
        """

        async def called(replica: Replica) -> None:
            worker = replica.worker
            try:
                await call(worker.server)
            except Exception as error:
                if not await self._remove_lost([(replica, worker)], error):
                    raise

        await asyncio.gather(*(called(self.replicas[each.info.replica]) for each in self.members))

    async def scale(self, count: int) -> list[ReplicaState]:
        """Add or remove replicas until there are ``count``; of several requests one is done after the other.

        It goes on although the caller leaves.

        Returns:
            How they are then.

        Raises:
            ConfigError: ``count`` is less than 1.
            JackfieldError: The first failure. Nothing is left of a replica that could not be added, the others of the
                same request are; the run goes on.
        """
        if count < 1:
            where, fix = "the number of replicas", "give a larger number, or end the run"
            raise ConfigError("a run needs a replica", where=where, expected="1 or more", found=count, fix=fix)
        scaling = asyncio.ensure_future(self._scale(count))
        self._scalings.add(scaling)
        scaling.add_done_callback(self._scalings.discard)
        return await asyncio.shield(scaling)

    async def _scale(self, count: int) -> list[ReplicaState]:
        async with self._scaling:
            self._connected()
            free = (number for number in itertools.count() if number not in self.replicas)
            new = [self._new(next(free)) for _ in range(count - len(self.replicas))]
            added = await asyncio.gather(*map(self._add, new), return_exceptions=True)
            for failed in filter(None, added):
                raise failed
            if len(self.replicas) > count:
                await self._remove([self.replicas[number] for number in sorted(self.replicas)[count:]])
            return await self.states()

    async def states(self) -> list[ReplicaState]:
        """Return how each replica is, by number."""
        return list(await asyncio.gather(*(replica.describe() for _, replica in sorted(self.replicas.items()))))

    # -- one replica's life

    def _new(self, number: int) -> Replica:
        replica = self.replicas[number] = Replica(number, self._clock)
        return replica

    async def _begin(self, replica: Replica) -> None:
        """Start a life of a replica."""
        replica.worker = await self._places.start(replica.number)
        starting, seconds = f"{replica.name} ({self._config.rollout.name}) to start", self._config.deadlines.start
        replica.info = await self._clock.wait_for(replica.worker.server.start(), seconds, starting)

    async def _join(self, replica: Replica) -> None:
        """Start a life, load the engine's present weights, then let requests in."""
        source = self._connected()
        if not source.takes_turns:
            await self._begin(replica)
        async with source.hold():
            if source.takes_turns:  # before, there is no room
                await self._begin(replica)
            async with self._loading:
                await source.load(Receiver(replica.worker.server, replica.info))
                self._set(replica, "serving")
                await self._route()

    def _watch(self, replica: Replica) -> None:
        if self._tasks is not None:
            replica.keeper = self._tasks.create_task(self._keep(replica), name=f"{replica.name}, its restarts")

    async def _keep(self, replica: Replica) -> None:
        """Restart one replica whenever it dies."""
        lost = await asyncio.shield(replica.worker.lost)
        while True:
            self._set(replica, "restarting")
            await self._route(0.0)  # its requests go elsewhere, or wait for a table that has a replica
            self._count(replica, lost)
            await self._stop(replica)
            try:
                await self._join(replica)
                lost = await asyncio.shield(replica.worker.lost)
            except JackfieldError as error:  # it may have died while it joined
                if not (isinstance(error, WorkerLost) or await replica.is_lost(replica.worker, error)):
                    raise
                lost = error

    def _count(self, replica: Replica, lost: JackfieldError) -> None:
        """Count a restart.

        Raises:
            JackfieldError: It was the last one: what is known of the death.
        """
        if replica.worker.restartable and replica.restarts < self._config.cluster.replica_restarts:
            replica.restarts += 1
            _LOG.warning("%s died and is started again: %s", replica.name, lost)
            return
        if isinstance(lost, WorkerLost) or not replica.worker.restartable:
            raise lost
        raise RolloutError(
            f"{replica.name} died again after {replica.restarts} restarts",
            code="rollout.stopped",
            where=f"replica {replica.number}",
            expected="a replica that answers until the run ends",
            found=lost,
            fix="look at what the server printed; cluster.replica_restarts allows more",
        ) from lost

    async def _stop(self, replica: Replica) -> None:
        """Stop a server. One that cannot be stopped ends with its process, or with the run's."""
        try:
            stopping = replica.worker.server.stop()
            await self._clock.wait_for(stopping, _STOP_SECONDS, f"{replica.name} to stop")
        except WorkerLost:
            return  # it has ended
        except Exception as error:
            _LOG.warning("%s does not stop: %s", replica.name, error)

    async def _end(self, replica: Replica) -> None:
        """Leave nothing of a replica."""
        if replica.keeper is not None:
            replica.keeper.cancel()
        self.replicas.pop(replica.number, None)
        if hasattr(replica, "worker"):
            await self._stop(replica)
            await self._places.end(replica.number)

    # -- adding and removing

    async def _add(self, replica: Replica) -> None:
        try:
            await self._join(replica)
        except BaseException:
            self._set(replica, "starting")
            with suppress(JackfieldError):
                await self._route(0.0)
            await self._end(replica)
            raise
        self._watch(replica)
        _LOG.info("%s serves, the run has %d", replica.name, len(self.members))

    async def _remove(self, replicas: Sequence[Replica]) -> None:
        """Send no requests there, wait for those that run or move them, send no weights there, end them."""
        before = {replica.number: replica.state for replica in replicas}
        try:
            for replica in replicas:
                self._set(replica, "draining")
            moved = await self._route()
            async with self._connected().hold():
                self.members[:] = [each for each in self.members if each.info.replica not in before]
        except BaseException:
            for replica in replicas:
                self._set(replica, before[replica.number])
            with suppress(JackfieldError):
                await self._route()
            raise
        await asyncio.gather(*map(self._end, replicas))
        numbers = ", ".join(map(str, sorted(before)))
        again = "%d of their requests were generated again elsewhere"
        _LOG.info(f"rollout replicas %s were removed, {again}", numbers, moved)

    # -- what all need

    def _set(self, replica: Replica, state: State) -> None:
        """Change a replica's state, and with it who gets weights."""
        replica.state = state
        members = [each for _, each in sorted(self.replicas.items()) if each.state in ("serving", "draining")]
        self.members[:] = [Receiver(each.worker.server, each.info) for each in members]

    async def _route(self, seconds: float | None = None) -> int:
        """Tell the agents who serves; return the number of requests that were moved for it."""
        served = {number: replica for number, replica in self.replicas.items() if replica.state == "serving"}
        return await self._places.route(served, self._config.deadlines.drain if seconds is None else seconds)

    async def _remove_lost(self, workers: Sequence[tuple[Replica, Worker]], error: Exception | None = None) -> bool:
        """Leave out members that have died and can be restarted; return whether there were any."""
        asked = [each for each in workers if each[1].restartable]
        lost = await asyncio.gather(*(replica.is_lost(worker, error) for replica, worker in asked))
        for (replica, worker), dead in zip(asked, lost, strict=True):
            if dead and replica.worker is worker and replica.state == "serving":
                self._set(replica, "restarting")
        return any(lost)

    def _connected(self) -> WeightSource:
        if self.source is None:
            raise RunError("the run has not begun yet", fix="ask again when its first step is under way")
        return self.source
