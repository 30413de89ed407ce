"""The replica pool, and the lease on devices that engines and replicas share."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Protocol

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.config import RunConfig
from jackfield.errors import ConfigError, JackfieldError, QueueError, RunError, WorkerLost
from jackfield.plugins.hooks import WeightsSynced
from jackfield.routing import LOST, Replica, ReplicaState, State

_STOP_SECONDS = 60.0
_LOG = logging.getLogger("jackfield")


class Places(Protocol):
    """Where replicas run: in this process, in other processes, or in a cluster."""

    async def start(self, replica: Replica) -> None:
        """Make a replica's server without starting it. If that fails, nothing of a new replica is left."""

    async def end(self, number: int) -> None:
        """Release the process and the place of a replica that has been stopped."""

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        """Tell all agents which replicas serve (see :class:`jackfield.routing.Router`)."""


class WeightSource(Protocol):
    """Brings the engine's current weights to replicas that join or are restarted."""

    takes_turns: bool  #: whether the engine must leave the device before a replica starts

    async def load(self, replica: Replica) -> None:
        """Send them to one replica, with a receipt, inside :meth:`hold`."""

    def hold(self) -> AbstractAsyncContextManager[None]:
        """Block training and weight syncs, and give replicas the device."""


@attrs.define(eq=False)
class ReplicaPool:
    """Owns the replicas of a run: it starts, routes, restarts, adds and removes them.

    All :attr:`members` get weights. Only replicas that have loaded the engine's weights are in the agents' routing
    tables and get requests. A replica that is being removed gets no new requests; it stays a member until its running
    requests have ended.
    """

    _places: Places
    _config: RunConfig
    _clock: Clock
    source: WeightSource | None = attrs.field(default=None, init=False)  #: None until the run has begun
    replicas: dict[int, Replica] = attrs.field(factory=dict, init=False)
    members: list[Replica] = attrs.field(factory=list, init=False)  #: replicas that get every version, by number
    _updating: Sequence[int] = attrs.field(default=(), init=False)  #: those whose turn it is to get new weights
    _scaling: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _loading: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)
    _tasks: asyncio.TaskGroup | None = attrs.field(default=None, init=False)
    _keepers: dict[int, asyncio.Task[None]] = attrs.field(factory=dict, init=False)  #: restart a replica that dies
    _scalings: set[asyncio.Task[list[ReplicaState]]] = attrs.field(factory=set, init=False)

    async def start(self, count: int) -> None:
        """Start the first replicas in order, with the weights of the model's folder."""
        for number in range(count):
            replica = self.replicas[number] = Replica(number=number, clock=self._clock)
            await self._begin(replica)
            self._set(replica, "serving")
        await self._route()

    async def keep(self) -> None:
        """Restart replicas that die, until cancelled; an exception group says that one has died too often."""
        try:
            async with asyncio.TaskGroup() as self._tasks:
                for replica in self.replicas.values():
                    self._watch(replica)
                await asyncio.Event().wait()
        finally:
            self._tasks = None

    async def close(self) -> None:
        """Cancel scaling and stop all replicas. :class:`Places` ends their processes."""
        for scaling in self._scalings:
            scaling.cancel()
        await asyncio.gather(*self._scalings, return_exceptions=True)
        self.members.clear()
        while self.replicas:
            replica = self.replicas.pop(max(self.replicas))
            await self._stop(replica)

    async def sync(self, version: int, send: Callable[..., Awaitable[WeightsSynced]]) -> WeightsSynced:
        """Send a version to all members by ``send(version, replicas, last=…)``, again without those that die meanwhile.

        With ``weights.in_turns`` there are two turns, and the other half gets new requests. A failure is raised if
        every member is alive.
        """
        halves, reports = self._config.weights.in_turns and len(self.members) > 1, list[WeightsSynced]()
        turns = [self.members[::2], self.members[1::2]] if halves else [self.members[:]]
        try:
            for turn in turns:
                if halves:
                    await self._route(updating=[each.number for each in turn])
                reports.append(await self._send(turn, partial(send, version, last=turn is turns[-1])))
        finally:
            if halves:
                await self._route(updating=())
        receipts = sorted(itertools.chain(*(each.receipts for each in reports)), key=lambda receipt: receipt.replica)
        return attrs.evolve(reports[-1], receipts=tuple(receipts), seconds=sum(each.seconds for each in reports))

    async def _send(self, turn: Sequence[Replica], send: Callable[..., Awaitable[WeightsSynced]]) -> WeightsSynced:
        while True:
            replicas = [each for each in self.replicas.values() if each.state != "starting"]
            try:
                return await send([each for each in turn if each in self.members])
            except JackfieldError:
                dead = [each for each in replicas if each.lost.done()]  # a broken transfer makes all others unhealthy
                if not await self._remove_lost(dead or replicas):
                    raise

    async def each(self, what: str, call: Callable[[BaseRolloutServer], Awaitable[object]]) -> None:
        """Call every member, and drop those that have died; raise the error of a live one, or of one that is late."""
        seconds = self._config.deadlines.sync

        async def called(replica: Replica) -> None:
            try:
                await self._clock.wait_for(call(replica.server), seconds, f"{replica.name} to {what}")
            except Exception as error:
                if not await self._remove_lost([replica], error):
                    raise

        await asyncio.gather(*map(called, self.members))

    async def scale(self, count: int) -> list[ReplicaState]:
        """Add or remove replicas until there are ``count``, at least 1; concurrent requests take turns.

        Scaling continues if the caller is cancelled. The first failure is raised. A replica that could not be added is
        removed entirely; the others of the request stay, and the run continues.
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
            new = list(itertools.islice(free, max(count - len(self.replicas), 0)))
            added = await asyncio.gather(*map(self._add, new), return_exceptions=True)
            for failed in filter(None, added):
                raise failed
            if len(self.replicas) > count:
                await self._remove([self.replicas[number] for number in sorted(self.replicas)[count:]])
            return await self.states()

    async def states(self) -> list[ReplicaState]:
        """Return the state of each replica, ordered by number."""
        return list(await asyncio.gather(*(replica.describe() for _, replica in sorted(self.replicas.items()))))

    async def _begin(self, replica: Replica) -> None:
        await self._places.start(replica)
        starting, seconds = f"{replica.name} ({self._config.rollout.name}) to start", self._config.deadlines.start
        replica.info = await self._clock.wait_for(replica.server.start(), seconds, starting)

    async def _join(self, replica: Replica) -> None:
        """Start a replica's server, load the engine's current weights, then route requests to it."""
        source = self._connected()
        if not source.takes_turns:
            await self._begin(replica)
        async with source.hold():
            if source.takes_turns:  # without the hold there is no room
                await self._begin(replica)
            async with self._loading:
                await source.load(replica)
                self._set(replica, "serving")
                await self._route()

    def _watch(self, replica: Replica) -> None:
        if self._tasks is not None:
            self._keepers[replica.number] = self._tasks.create_task(self._keep(replica))

    async def _keep(self, replica: Replica) -> None:
        """Start a replica again whenever it dies; raise how it died if no restart is left."""
        lost = await asyncio.shield(replica.lost)
        while True:
            self._set(replica, "restarting")
            await self._route(0.0)  # its requests go elsewhere, or wait until a replica serves
            restarts, most = replica.restarts, self._config.cluster.replica_restarts
            if replica.place == "here" or (restarts >= most and isinstance(lost, WorkerLost)):
                raise lost
            if restarts >= most:
                fix = "look at what the server printed; cluster.replica_restarts allows more"
                raise replica.stopped(f"died again after {restarts} restarts", lost, fix) from lost
            _LOG.warning("%s died and is started again: %s", replica.name, lost)
            await self._stop(replica)
            number, place = replica.number, replica.place  # the place, too, for one that dies before its server is made
            replica = Replica(number=number, clock=self._clock, state="restarting", restarts=restarts + 1, place=place)
            self.replicas[number] = replica
            try:
                await self._join(replica)
                lost = await asyncio.shield(replica.lost)
            except JackfieldError as error:  # it may have died while it joined
                if not (replica.server is None or isinstance(error, WorkerLost) or await replica.is_lost(error)):
                    raise
                lost = error

    async def _stop(self, replica: Replica) -> None:
        """Stop a server. If it cannot be stopped, it ends with its process or with the run's."""
        if not replica.server:
            return
        try:
            await self._clock.wait_for(replica.server.stop(), _STOP_SECONDS, f"{replica.name} to stop")
        except Exception as error:
            if not (isinstance(error, JackfieldError) and error.code in LOST):  # otherwise it has ended
                _LOG.warning("%s does not stop: %s", replica.name, error)

    async def _end(self, replica: Replica) -> None:
        if keeper := self._keepers.pop(replica.number, None):
            keeper.cancel()
        replica = self.replicas.pop(replica.number, replica)
        await self._stop(replica)
        if replica.server is not None:
            await self._places.end(replica.number)

    async def _add(self, number: int) -> None:
        replica = self.replicas[number] = Replica(number=number, clock=self._clock)
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
        """Stop routing to replicas, wait for their requests or move them, then end the replicas."""
        before = {replica.number: replica.state for replica in replicas}
        try:
            for replica in replicas:
                self._set(replica, "draining")
            moved = await self._route()
            async with self._connected().hold():
                self.members[:] = [each for each in self.members if each.number not in before]
        except BaseException:
            for replica in replicas:
                self._set(replica, before[replica.number])
            with suppress(JackfieldError):
                await self._route()
            raise
        await asyncio.gather(*map(self._end, replicas))
        what = "rollout replicas %s were removed, %d of their requests continue elsewhere"
        _LOG.info(what, ", ".join(map(str, sorted(before))), moved)

    def _set(self, replica: Replica, state: State) -> None:
        replica.state = state
        members = [each for _, each in sorted(self.replicas.items()) if each.state in ("serving", "draining")]
        self.members[:] = members

    async def _route(self, seconds: float | None = None, updating: Sequence[int] | None = None) -> int:
        self._updating = self._updating if updating is None else updating
        served = {number: replica for number, replica in self.replicas.items() if replica.state == "serving"}
        drain = self._config.deadlines.drain if seconds is None else seconds
        return await self._places.route(served, drain, self._updating)

    async def _remove_lost(self, replicas: Sequence[Replica], error: Exception | None = None) -> bool:
        """Drop members that have died and can be restarted; return whether there were any."""
        asked = [each for each in replicas if each.place != "here" and each.server is not None]
        lost = await asyncio.gather(*(replica.is_lost(error) for replica in asked))
        for replica, dead in zip(asked, lost, strict=True):
            if dead and replica.state == "serving":
                self._set(replica, "restarting")
        return any(lost)

    def _connected(self) -> WeightSource:
        if self.source is None:
            raise RunError("the run has not begun yet", fix="ask again when its first step is under way")
        return self.source


@attrs.define(eq=False)
class DeviceLease:
    """A lease on devices for one role at a time, which may have several holders.

    A phase requests it once its inputs are ready, and never waits for another phase while it holds the lease. So the
    lease cannot deadlock. Requests are served in order. No role waits for holders that step aside: ``hand_over``
    interrupts what they run, and they have the devices again when the other role's holder ends.
    """

    _clock: Clock
    _seconds: float  #: deadline for acquiring the lease, and for a hand-over
    #: awaited when the role changes, with the previous role (None at first) and the new one
    hand_over: Callable[[str | None, str], Awaitable[None]] | None = None
    waited: dict[str, float] = attrs.field(factory=dict, init=False)  #: seconds by role, until they are read
    _role: str | None = attrs.field(default=None, init=False)  #: the role that holds the lease, or held it last
    _holders: int = attrs.field(default=0, init=False)  #: those that other roles wait for
    _aside: list[str] = attrs.field(factory=list, init=False)  #: roles of the holders that step aside
    _resident: str | None = attrs.field(default=None, init=False)  #: the role whose state is on the devices
    _waiting: dict[object, str] = attrs.field(factory=dict, init=False)  #: roles of the requests, in order
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)
    _handing_over: asyncio.Lock = attrs.field(factory=asyncio.Lock, init=False)

    @asynccontextmanager
    async def hold(self, role: str, *, joins: bool = False, steps_aside: bool = False) -> AsyncIterator[None]:
        """Hold the devices for ``role``. ``DeadlineExceeded`` names the role that holds them for too long.

        With ``joins``, join a current holder of the same role ahead of other requests, because it waits for this one.
        With ``steps_aside``, other roles may have the devices in between.
        """
        request, firm = object(), 1

        def is_granted() -> bool:
            """Return whether no other role holds the lease or waited before."""
            first = next(each for each, other in self._waiting.items() if each is request or other != role)
            free = not self._holders or self._role == role
            return free and (first is request or (joins and self._holders > 0))

        async def acquire() -> None:
            while not is_granted():
                await self._changed.wait()
            self._role = role
            self._holders += 1

        self._waiting[request], who = role, f"the devices, for {role}, while {self._role} holds them"
        began = self._clock.time()
        try:
            await self._clock.wait_for(acquire(), self._seconds, who)
        finally:
            self.waited[role] = self.waited.get(role, 0.0) + self._clock.time() - began
            del self._waiting[request]
            self._wake()
        try:
            async with self._handing_over:
                before = self._resident
                if before != role and self.hand_over is not None:
                    what = f"the hand-over of devices from {before} to {role}"
                    await self._clock.wait_for(self.hand_over(before, role), self._seconds, what)
                self._resident = role
            if steps_aside:
                firm, self._holders = 0, self._holders - 1
                self._aside.append(role)
                self._wake()
            yield
        finally:
            self._holders -= firm
            if not firm:
                self._aside.remove(role)
            self._wake()
            others = [each for each in self._aside if each != role]
            if others and isinstance(sys.exception(), QueueError | None):  # any other error ends the run
                async with self.hold(others[0]):  # what they run goes on
                    pass

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
