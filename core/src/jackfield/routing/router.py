"""The router, which chooses replicas for requests, and the check for dead replicas."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Protocol

import attrs

from jackfield.abc.rollout import GenerateRequest, GenerateResult, HealthReport, SamplingParams
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError

LOST = ("rollout.stopped", "worker.died")  #: codes of errors which mean that a replica has died
HEALTH_SECONDS = 10.0  #: for a replica to report its health

#: Codes by which a healthy replica refuses a single request.
_REFUSALS = ("rollout.request", "rollout.context-length", "rollout.stale", "plugin.capability")
_WAIT_SECONDS = 3600.0  #: for a replica that serves; the pool's own deadlines are shorter
_UPDATE_SECONDS = 600.0  #: for a failed weight update to be repeated
_LOOK_SECONDS = 0.1  #: between two checks whether it was repeated


class Generates(Protocol):
    """The methods of a replica that the router calls."""

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample."""

    async def health(self) -> HealthReport:
        """Report whether the replica can serve."""


@attrs.define(eq=False)
class _Route:
    """A replica that gets requests, or got them before it was removed."""

    number: int
    server: Generates
    running: set[asyncio.Task[GenerateResult]] = attrs.field(factory=set)


@attrs.define(eq=False)
class Router:
    """Sends a rollout's requests to one replica, the least loaded at its first turn."""

    _clock: Clock
    _routes: dict[int, _Route] = attrs.field(factory=dict, init=False)  #: requests wait while this is empty
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def of_one_rollout(
        self, asks: Callable[[SamplingParams], None] = lambda _: None
    ) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
        """Return a function that generates for one rollout, on one replica for its cache.

        ``asks`` is called with the sampling parameters of each request.

        If the replica dies or is removed, the request starts again on another one, with the same seed. If a weight
        update fails and the request with it, the request is repeated after the next update. Any other error of a live
        replica is raised.
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
                            del self._routes[chosen.number]  # the pool's next table decides about it
                    elif error.code != "rollout.stale" or not await self._is_updated(chosen, request):
                        raise
                else:
                    if result is not None:
                        return result

        return generate

    async def route(self, servers: Mapping[int, Generates], seconds: float) -> int:
        """Use these replicas from now on; return when no request is left on removed ones.

        Args:
            servers: Replicas by number. A number that is already in use keeps its replica.
            seconds: Time for requests on a removed replica to end. The rest are generated again elsewhere.

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
        """Wait until a removed replica has no requests, and move those that take too long."""
        if not route.running:
            return 0
        _, late = await asyncio.wait(set(route.running), timeout=seconds)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    async def _generate(self, route: _Route, request: GenerateRequest) -> GenerateResult | None:
        """Generate on a replica; return None if its removal aborted the request."""
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
        """Wait until a replica has complete weights; return whether they are new enough.

        Raises:
            DeadlineExceeded: If the weights do not come in time; the replica is named.
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
        """Return the replica with the fewest running requests; wait for one while none serves."""
        while not self._routes:
            await self._clock.wait_for(self._changed.wait(), _WAIT_SECONDS, "a rollout replica that serves")
        return min(self._routes.values(), key=lambda route: len(route.running))

    def _is_removed(self, route: _Route) -> bool:
        return self._routes.get(route.number) is not route


async def cause_of_death(server: Generates, clock: Clock, name: str, error: Exception | None = None) -> str | None:
    """Ask a replica for its health. Return why it no longer serves, or None if it does.

    Args:
        server: Server of the replica.
        clock: Time source of the deadline.
        name: Name of the replica, for messages.
        error: Error of a failed request. A mere refusal of the request means that the replica is healthy.
    """
    if isinstance(error, JackfieldError) and error.code in _REFUSALS:
        return None
    try:
        report = await clock.wait_for(server.health(), HEALTH_SECONDS, f"{name} to tell its health")
    except Exception as silence:
        return f"{type(silence).__name__}: {silence}"
    return None if report.healthy else report.detail or "not healthy"
