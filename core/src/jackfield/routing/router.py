"""Which replica serves a request, and whether one that has failed a request still lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import attrs

from jackfield.abc.rollout import GenerateRequest, GenerateResult, HealthReport, SamplingParams
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

    async def health(self) -> HealthReport:
        """Report whether the replica can serve."""


@attrs.define(eq=False)
class _Route:
    """A replica that gets requests, or did."""

    number: int
    server: Generates
    running: set[asyncio.Task[GenerateResult]] = attrs.field(factory=set)


@attrs.define(eq=False)
class Router:
    """Sends requests to the replica with the fewest running ones; later turns of a rollout go where its first went."""

    _clock: Clock
    _routes: dict[int, _Route] = attrs.field(factory=dict, init=False)  #: requests wait while there is none
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def of_one_rollout(
        self, asks: Callable[[SamplingParams], None] = lambda _: None
    ) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
        """Return what generates for one rollout: its first replica has the earlier turns in its cache.

        ``asks`` receives the sampling parameters of each request.

        A request of a replica that dies or is removed is generated on another one, from its beginning, with the same
        seed. A request that fails with an update of its replica's weights is repeated after the next update. Any other
        error of a living replica is the request's.
        """
        chosen: _Route | None = None

        async def generate(request: GenerateRequest) -> GenerateResult:
            nonlocal chosen
            asks(request.sampling)
            while True:
                if chosen is None or self._is_removed(chosen):
                    chosen = await self._least_loaded()
                try:
                    result = await self._generate(chosen, request)
                except JackfieldError as error:
                    if error.code in LOST:
                        if not self._is_removed(chosen):
                            del self._routes[chosen.number]  # the pool's next table says what becomes of it
                    elif error.code != "rollout.stale" or not await self._is_updated(chosen, request):
                        raise
                else:
                    if result is not None:
                        return result

        return generate

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
        _, late = await asyncio.wait(set(route.running), timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    async def _generate(self, route: _Route, request: GenerateRequest) -> GenerateResult | None:
        """Generate on a replica. Returns None for a request that was aborted because its replica was removed."""
        task = asyncio.ensure_future(route.server.generate(request))
        route.running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._is_removed(route) and task.cancelled() and not (own and own.cancelling()):
                return None
            raise
        finally:
            route.running.discard(task)

    async def _is_updated(self, route: _Route, request: GenerateRequest) -> bool:
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
                what = f"{name} to get weights after an update failed: {report.detail}"
                raise DeadlineExceeded(f"waited {_UPDATE_SECONDS:g} s for {what}")
            await self._clock.sleep(_LOOK_SECONDS)
        return True

    async def _least_loaded(self) -> _Route:
        """Choose a replica; wait for one while none serves."""
        while not self._routes:
            await self._clock.wait_for(self._changed.wait(), _WAIT_SECONDS, "a rollout replica that serves")
        return min(self._routes.values(), key=lambda route: len(route.running))

    def _is_removed(self, route: _Route) -> bool:
        return self._routes.get(route.number) is not route


async def cause_of_death(server: Generates, clock: Clock, name: str, error: Exception | None = None) -> str | None:
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
