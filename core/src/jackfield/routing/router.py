"""Which replica serves a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Protocol

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult, HealthReport
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError

LOST = ("rollout.stopped", "worker.died")  #: codes of errors that say that a replica has died
HEALTH_SECONDS = 10.0  #: for a replica to tell its health

#: Refusals of one request by a replica that is well.
_REFUSALS = ("rollout.request", "rollout.context-length", "rollout.stale", "plugin.capability")
_WAIT_SECONDS = 3600.0  #: for a replica that serves; the pool's own deadlines are shorter
_UPDATE_SECONDS = 600.0  #: for an update that has failed to be repeated
_LOOK_SECONDS = 0.1  #: between two looks at whether it was


class Generates(Protocol):
    """What the router needs of a replica."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""
        ...

    async def health(self) -> HealthReport:
        """Report whether the replica can serve."""
        ...


@attrs.define(eq=False)
class _Route:
    """A replica that gets requests, or did."""

    number: int
    server: Generates
    running: set[asyncio.Task[GenerateResult]] = attrs.field(factory=set)
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)


class _Moved(Exception):
    """A request was aborted because its replica was removed."""


class Router:
    """Sends requests to the replica with the fewest running ones; later turns of a rollout go where its first went."""

    def __init__(self, clock: Clock, servers: Mapping[int, Generates] | None = None) -> None:
        """
        Args:
            clock: Time source for all waits and deadlines.
            servers: Those that serve, by number. Requests wait while there is none.
        """
        self._clock = clock
        self._routes = {number: _Route(number, server) for number, server in (servers or {}).items()}
        self._changed = asyncio.Event()

    def of_one_rollout(self) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
        """Return what generates for one rollout: its first replica has the earlier turns in its cache.

        A request of a replica that dies or is removed is generated on another one, from its beginning, with the same
        seed. A request that fails with an update of its replica's weights is repeated after the next update.
        """
        chosen: _Route | None = None

        async def generate(request: GenerateRequest) -> GenerateResult:
            nonlocal chosen
            while True:
                if chosen is None or self._is_removed(chosen):
                    chosen = await self._least_loaded()
                try:
                    return await self._generate(chosen, request)
                except _Moved:
                    continue
                except JackfieldError as error:
                    await self._require_repeatable(chosen, request, error)

        return generate

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the least loaded replica; again elsewhere, where it dies.

        Raises:
            Exception: What a living replica raised.
            DeadlineExceeded: No replica has come back.
        """
        return await self.of_one_rollout()(request)

    async def route(self, servers: Mapping[int, Generates], seconds: float) -> int:
        """Use these replicas from now on; return when no request is left on those that are not among them.

        Args:
            servers: By number; one whose number is known stays as it is.
            seconds: For requests on a removed replica to end. Then they are generated again elsewhere.

        Returns:
            Number of requests that were moved.
        """
        removed = [route for number, route in self._routes.items() if number not in servers]
        self._routes = {
            number: self._routes.get(number) or _Route(number, server) for number, server in servers.items()
        }
        self._changed.set()
        self._changed = asyncio.Event()
        return sum(await asyncio.gather(*(self._empty(route, seconds) for route in removed)))

    async def _empty(self, route: _Route, seconds: float) -> int:
        """Wait until a removed replica has no request, or move what it has."""
        if not route.running:
            return 0
        with suppress(DeadlineExceeded):
            await self._clock.wait_for(route.idle.wait(), seconds, f"requests on replica {route.number} to end")
        late = list(route.running)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    async def _generate(self, route: _Route, request: GenerateRequest) -> GenerateResult:
        task = asyncio.ensure_future(route.server.generate(request))
        route.running.add(task)
        route.idle.clear()
        try:
            return await task
        except asyncio.CancelledError:
            if self._is_removed(route) and task.cancelled() and not _is_cancelled():
                raise _Moved from None
            raise
        finally:
            route.running.discard(task)
            if not route.running:
                route.idle.set()

    async def _require_repeatable(self, route: _Route, request: GenerateRequest, error: JackfieldError) -> None:
        """Return when a request can be sent once more; otherwise raise its error."""
        if error.code in LOST:
            if not self._is_removed(route):
                del self._routes[route.number]  # the pool's next table says what becomes of it
        elif error.code != "rollout.stale" or not await self._updated(route, request):
            raise error

    async def _updated(self, route: _Route, request: GenerateRequest) -> bool:
        """Wait until a replica has whole weights; return whether these are new enough for a refused request.

        Raises:
            DeadlineExceeded: Naming the replica.
        """
        name, ends = f"replica {route.number}", self._clock.time() + _UPDATE_SECONDS
        while not self._is_removed(route):
            asked = route.server.health()
            report = await self._clock.wait_for(asked, HEALTH_SECONDS, f"{name} to tell its health")
            if report.healthy:
                return report.weight_version >= (request.minimum_weight_version or 0)
            if self._clock.time() >= ends:
                raise DeadlineExceeded(
                    f"waited {_UPDATE_SECONDS:g} s for {name} to get weights after an update failed: {report.detail}"
                )
            await self._clock.sleep(_LOOK_SECONDS)
        return True

    async def _least_loaded(self) -> _Route:
        """Choose a replica; wait for one while none serves."""
        while not self._routes:
            await self._clock.wait_for(self._changed.wait(), _WAIT_SECONDS, "a rollout replica that serves")
        return min(self._routes.values(), key=lambda route: len(route.running))

    def _is_removed(self, route: _Route) -> bool:
        return self._routes.get(route.number) is not route


async def cause_of_death(
    server: BaseRolloutServer, clock: Clock, name: str, error: Exception | None = None
) -> str | None:
    """Ask a replica for its health. Returns why it does not serve any more; None: it does.

    Args:
        server: The replica's.
        clock: Time source of the deadline.
        name: Name of the replica, for messages.
        error: Error of a request. One by which it refused the request says that it is well.
    """
    if isinstance(error, JackfieldError) and error.code in _REFUSALS:
        return None
    try:
        report = await clock.wait_for(server.health(), HEALTH_SECONDS, f"{name} to tell its health")
    except Exception as silence:
        return f"{type(silence).__name__}: {silence}"
    return None if report.healthy else report.detail or "not healthy"


def _is_cancelled() -> bool:
    """Return whether the current task is to end itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
