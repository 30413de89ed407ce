"""A replica in an actor that Ray starts again when it dies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult, RolloutContext, ServerInfo
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, WorkerLost
from jackfield.runtime.ray.stub import RemoteServer, answer
from jackfield.runtime.revival import LastingServer, state_of

__all__ = ["LastingReplica"]

_FOREVER = 10 * 365 * 24 * 3600.0


class LastingReplica(LastingServer):
    """The controller's stand-in for a replica in an actor, which agents reach by a
    :class:`~jackfield.runtime.ray.stub.RemoteServer` of their own.

    The actor's gate holds the agents' requests back until the replica has weights: those of the next synchronisation,
    or of :meth:`keep`'s ``bring_up``, whichever is first. So a new replica never serves the weights of the model's
    folder, and nobody who holds the devices waits for somebody who wants them.
    """

    def __init__(
        self,
        actor: Any,
        name: str,
        context: RolloutContext,
        begin: Callable[[], Awaitable[None]],
        *,
        restarts: int,
        start_seconds: float,
        seconds: float,
    ) -> None:
        """
        Args:
            actor: of a :class:`~jackfield.runtime.ray.host.Host`.
            name: of the replica.
            context: as the replica has it there.
            begin: makes the server in the actor, if it is not there.
            restarts: how often the replica is made anew; its next death is ``WorkerLost``.
            start_seconds: for a new one to start.
            seconds: the longest that any call may take.
        """
        self._actor = actor

        def make() -> BaseRolloutServer:
            server: Any = _Server(actor, name, seconds)
            server.begin, server.config, server.context = begin, None, context
            return server  # type: ignore[no-any-return]

        super().__init__(make, restarts=restarts, start_seconds=start_seconds)
        self.behind = True
        self.for_agents = RemoteServer(actor, name, seconds)  #: what an agent worker gets

    async def start(self) -> ServerInfo:
        """Start the first replica, which has the weights of the model's folder, as everybody."""
        info = await super().start()
        await self.admit()
        return info

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample for the controller itself, whatever the gate says.

        Raises:
            WorkerLost: the replica has died.
        """
        await self._ready()
        return await self._server.generate(request)

    async def admit(self) -> None:
        """Let requests in: the replica has weights."""
        if self.behind and self.available:
            await self._let_in()

    async def keep(self, bring_up: Callable[[LastingReplica], Awaitable[None]]) -> None:
        """Make the replica anew whenever its process dies.

        Args:
            bring_up: brings weights to it when the engine does not train, unless a synchronisation was faster.

        Raises:
            WorkerLost: it has died too often.
        """
        while True:
            try:
                await answer(self._actor.live.remote(), self._name, f"{self._name} to live", _FOREVER, self._clock)
            except WorkerLost as error:
                await self._revive_after(error)
                try:
                    await bring_up(self)
                except JackfieldError:
                    if await state_of(self._server, self._clock, self._name) is None:
                        raise

    async def _revive_after(self, error: WorkerLost) -> None:
        """Have it made anew; once more, if it dies meanwhile."""
        while True:
            if self.available:
                self._begin(error, weights=False)
            try:
                await self._ready()
                return
            except WorkerLost as again:
                if self.revived >= self._restarts:
                    raise
                error = again

    async def _revive(self, error: Exception, weights: bool) -> None:
        self.behind = True
        if self.revived >= self._restarts:
            self._revival = None
            if isinstance(error, WorkerLost):
                raise error
            raise WorkerLost(f"{self._name} died", where=self._name, found=error) from error
        await super()._revive(error, weights)

    async def _let_in(self) -> None:
        waiting_for = f"{self._name} to let requests in"
        await answer(self._actor.open.remote(), self._name, waiting_for, self._start_seconds, self._clock)
        self.behind = False


class _Server(RemoteServer):
    """One life of a replica."""

    begin: Callable[[], Awaitable[None]]

    async def start(self) -> ServerInfo:
        """Make and start it, once Ray has started the process."""
        await self.begin()
        info: ServerInfo = await self._call("start")
        return info

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        result: GenerateResult = await self._call("generate", request)
        return result

    async def stop(self) -> None:
        """End it, and make room for the next one."""
        await super().stop()
        try:
            await answer(self._actor.end.remote(), self._name, f"{self._name} to end", self._seconds, Clock())
        except (WorkerLost, DeadlineExceeded):
            return
