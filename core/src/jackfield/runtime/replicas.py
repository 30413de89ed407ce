"""The replicas of a run: which there are, how they are, and how some are added and removed while it goes on."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from typing import Literal, Protocol

import attrs

from jackfield.abc.rollout import BaseRolloutServer
from jackfield.clock import Clock
from jackfield.errors import ConfigError, JackfieldError, RunError
from jackfield.runtime.ray.replica import LastingReplica
from jackfield.runtime.revival import LastingServer
from jackfield.weights import Replica

__all__ = ["Fleet", "Joining", "ReplicaState", "Replicas"]

_HEALTH_SECONDS = 10.0
_STOP_SECONDS = 60.0


class Fleet(Protocol):
    """Where replicas live: in this process, or in a cluster."""

    async def add(self, number: int) -> BaseRolloutServer:
        """Make a replica, and a place for it; it is not started.

        Raises:
            JackfieldError: there is no room, or it does not come; nothing of it is left.
        """
        ...

    async def remove(self, number: int) -> None:
        """Give up the process and the place of a replica that has been stopped, if it has any of its own."""
        ...

    async def route(self, replicas: Mapping[int, BaseRolloutServer], seconds: float) -> int:
        """Tell all agents which replicas there are: :meth:`jackfield.runtime.router.ReplicaRouter.reroute`."""
        ...


@attrs.frozen(kw_only=True)
class Joining:
    """What a replica needs of the run in order to join it; known once the trainer is there."""

    #: keeps the engine from training and everybody from synchronising, and gives replicas the device
    hold: Callable[[], AbstractAsyncContextManager[None]]
    #: brings it the engine's weights, with a receipt, and tries it; called where the engine is held
    join: Callable[[Replica], Awaitable[None]]
    #: brings them to one that was made anew; called by somebody who generates, or holds the device for those who do
    catch_up: Callable[[Replica], Awaitable[None]]
    #: the same for :meth:`LastingReplica.keep`, which holds nothing
    bring_up: Callable[[LastingReplica], Awaitable[None]]
    takes_turns: bool  #: whether the engine leaves the device before a replica may load anything


@attrs.frozen(kw_only=True)
class ReplicaState:
    """How a replica is."""

    replica: int
    state: Literal["starting", "serving", "draining", "restarting", "unhealthy"]
    weight_version: int | None = None  #: None: not known
    running: int = 0  #: requests that are decoded now
    waiting: int = 0  #: requests that wait for a place in the batch
    restarts: int = 0  #: times that it was made anew
    address: str | None = None  #: of its OpenAI-compatible endpoint
    detail: str = ""


class Replicas:
    """The one live list of a run's replicas.

    The synchroniser, :class:`~jackfield.runtime.revival.LastingWeights` and
    :class:`~jackfield.runtime.shared_device.SharedDevice` read :attr:`members`; agents are told by :meth:`Fleet.route`.
    A replica becomes a member, and gets requests, once it has acknowledged the engine's weights. It gets no requests
    any more, has ended those that it had, and stays a member up to then, before it is removed.
    """

    def __init__(self, fleet: Fleet, clock: Clock, *, name: str, start_seconds: float, drain_seconds: float) -> None:
        """
        Args:
            fleet: makes and ends them.
            clock: through which every wait goes.
            name: of the rollout plugin, for messages.
            start_seconds: for one to start.
            drain_seconds: for the requests of one that is removed to end; then they are generated again elsewhere.
        """
        self._fleet = fleet
        self._clock = clock
        self._name = name
        self._start_seconds = start_seconds
        self._drain_seconds = drain_seconds
        self._scaling = asyncio.Lock()
        self._starting: set[int] = set()
        self._draining: set[int] = set()
        self._joining: Joining | None = None
        self._one_at_a_time = asyncio.Lock()
        self._keepers: asyncio.TaskGroup | None = None
        self._kept: dict[int, asyncio.Task[None]] = {}
        self._servers: dict[int, BaseRolloutServer] = {}  # that were started, and are not stopped
        self.members: list[Replica] = []  #: by number: those that get every version of the weights

    # -- the run's beginning and end --------------------------------------------------------------------------------

    async def start(self, servers: Sequence[BaseRolloutServer]) -> None:
        """Start the first ones, in order; they have the weights of the model's folder."""
        for number, server in enumerate(servers):
            self.members.append(await self._start(number, server))

    def connect(self, joining: Joining) -> None:
        """Have what replicas need that join later, or are made anew."""
        self._joining = joining
        for replica in self.members:
            self._prepare(replica)

    async def keep(self) -> None:
        """Have those replicas made anew whose processes die; never returns.

        Raises:
            WorkerLost: in a group: one has died too often.
        """
        try:
            async with asyncio.TaskGroup() as self._keepers:
                for replica in self.members:
                    self._keep(replica)
                await asyncio.Event().wait()
        finally:
            self._keepers = None

    async def close(self) -> None:
        """Stop them all, also where the beginning failed; their processes and places are left to the fleet."""
        self.members.clear()
        async with AsyncExitStack() as stack:
            while self._servers:
                stack.push_async_callback(self._servers.pop(min(self._servers)).stop)

    # -- while it goes on ---------------------------------------------------------------------------------------------

    async def scale(self, count: int) -> list[ReplicaState]:
        """Add or remove replicas until there are ``count``; of several requests one is done after the other.

        Returns:
            how they are then.

        Raises:
            ConfigError: ``count`` is less than 1.
            JackfieldError: the first thing that went wrong. Nothing is left of a replica that could not be added, the
                others of the same request are; the run goes on.
        """
        if count < 1:
            raise ConfigError(
                "a run needs a replica", where="the number of replicas", expected="1 or more", found=count,
                fix="give a larger number, or end the run",
            )  # fmt: skip
        async with self._scaling:
            taken = {_number(replica) for replica in self.members}
            free = (number for number in itertools.count() if number not in taken)
            adding = [self._add(next(free)) for _ in range(count - len(taken))]
            failed = [each for each in await asyncio.gather(*adding, return_exceptions=True) if each is not None]
            if failed:
                raise failed[0]
            if self.members[count:]:
                await self._remove(self.members[count:])
            return await self.states()

    async def states(self) -> list[ReplicaState]:
        """How each is, those included that are not members yet."""
        members = await asyncio.gather(*(self._state(replica) for replica in self.members))
        starting = (ReplicaState(replica=number, state="starting") for number in self._starting)
        return sorted([*members, *starting], key=lambda state: state.replica)

    # -- adding -------------------------------------------------------------------------------------------------------

    async def _add(self, number: int) -> None:
        """Make, start, bring to the engine's weights, let in."""
        joining = self._connected()
        self._starting.add(number)
        try:
            server = await self._fleet.add(number)
            try:
                async with AsyncExitStack() as held:
                    if joining.takes_turns:
                        await held.enter_async_context(joining.hold())
                    replica = await self._start(number, server)
                    if not joining.takes_turns:
                        await held.enter_async_context(joining.hold())
                    async with self._one_at_a_time:
                        await self._join(joining, replica)
            except BaseException:
                await self._end(number, server)
                raise
        finally:
            self._starting.discard(number)

    async def _start(self, number: int, server: BaseRolloutServer) -> Replica:
        self._servers[number] = server
        waiting_for = f"rollout replica {number} ({self._name}) to start"
        return Replica(server, await self._clock.wait_for(server.start(), self._start_seconds, waiting_for))

    async def _join(self, joining: Joining, replica: Replica) -> None:
        """Nobody trains, synchronises or joins meanwhile."""
        number = _number(replica)
        await joining.join(replica)
        self.members.append(replica)
        self.members.sort(key=_number)
        self._starting.discard(number)
        try:
            await self._route()
        except BaseException:
            self.members.remove(replica)
            with suppress(JackfieldError):
                await self._route()
            raise
        self._prepare(replica)
        self._keep(replica)
        logging.getLogger("jackfield").info("rollout replica %d serves, the run has %d", number, len(self.members))

    # -- removing -----------------------------------------------------------------------------------------------------

    async def _remove(self, replicas: Sequence[Replica]) -> None:
        """Send no requests there, wait for those that run or abort them, send no weights there, end them."""
        joining, numbers = self._connected(), {_number(replica) for replica in replicas}
        self._draining |= numbers
        try:
            aborted = await self._route()
            async with joining.hold():
                self.members[:] = [replica for replica in self.members if _number(replica) not in numbers]
        except BaseException:
            self._draining -= numbers
            with suppress(JackfieldError):
                await self._route()
            raise
        self._draining -= numbers
        await asyncio.gather(*(self._end(_number(replica), replica.server) for replica in replicas))
        logging.getLogger("jackfield").info(
            "rollout replicas %s were removed, %d of their requests were generated again elsewhere",
            ", ".join(map(str, sorted(numbers))),
            aborted,
        )

    async def _end(self, number: int, server: BaseRolloutServer) -> None:
        keeper = self._kept.pop(number, None)
        if keeper is not None:
            keeper.cancel()
        await self._stop(number, server)
        await self._fleet.remove(number)

    async def _stop(self, number: int, server: BaseRolloutServer) -> None:
        """What cannot be stopped ends with its process, or with the run's."""
        self._servers.pop(number, None)
        try:
            await self._clock.wait_for(server.stop(), _STOP_SECONDS, f"rollout replica {number} to stop")
        except Exception as error:
            logging.getLogger("jackfield").warning("rollout replica %d does not stop: %s", number, error)

    # -- what both need -----------------------------------------------------------------------------------------------

    async def _route(self) -> int:
        """Tell the agents; returns how many requests were aborted for it."""
        served = {
            _number(replica): replica.server for replica in self.members if _number(replica) not in self._draining
        }
        return await self._fleet.route(served, self._drain_seconds)

    def _connected(self) -> Joining:
        if self._joining is None:
            raise RunError("the run has not begun yet", fix="ask again when its first step is under way")
        return self._joining

    def _prepare(self, replica: Replica) -> None:
        """A server in a process of its own, without Ray, asks for weights itself when it is made anew."""
        joining, server = self._connected(), replica.server
        if isinstance(server, LastingServer) and not isinstance(server, LastingReplica):
            server.catch_up = lambda server, info: joining.catch_up(Replica(server, info))

    def _keep(self, replica: Replica) -> None:
        server = replica.server
        if self._keepers is not None and isinstance(server, LastingReplica):
            self._kept[_number(replica)] = self._keepers.create_task(server.keep(self._connected().bring_up))

    async def _state(self, replica: Replica) -> ReplicaState:
        number, server = _number(replica), replica.server
        lasting = server if isinstance(server, LastingServer) else None
        info = (lasting and lasting.info) or replica.info
        state = ReplicaState(
            replica=number,
            state="draining" if number in self._draining else "serving",
            restarts=lasting.revived if lasting else 0,
            address=info.openai_base_url,
        )
        if lasting and (lasting.behind or not lasting.available):
            return attrs.evolve(state, state="restarting")
        try:
            waiting_for = f"rollout replica {number} to tell its health"
            report = await self._clock.wait_for(server.health(), _HEALTH_SECONDS, waiting_for)
        except JackfieldError as error:
            return attrs.evolve(state, state="unhealthy", detail=error.message)
        return attrs.evolve(
            state,
            state=state.state if report.healthy else "unhealthy",
            weight_version=report.weight_version,
            running=report.running,
            waiting=report.waiting,
            detail=report.detail,
        )


def _number(replica: Replica) -> int:
    return replica.info.replica
