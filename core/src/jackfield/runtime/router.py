"""Which replica serves a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError, WorkerLost
from jackfield.runtime.revival import state_of

__all__ = ["ReplicaRouter"]

_HEALTH_SECONDS = 10.0
_UPDATE_SECONDS = 600.0  #: for an update that has failed to be made again
_LOOK_SECONDS = 0.1  #: between two looks at whether it was


@attrs.define(eq=False)
class _Route:
    """A replica that gets requests, or did."""

    number: int
    server: BaseRolloutServer
    running: set[asyncio.Task[GenerateResult]] = attrs.field(factory=set)
    idle: asyncio.Event = attrs.field(factory=asyncio.Event)

    @property
    def available(self) -> bool:
        return bool(getattr(self.server, "available", True))


class ReplicaRouter:
    """Sends requests to the replica with the fewest running ones; later turns of one run go where its first went."""

    def __init__(self, replicas: Mapping[int, BaseRolloutServer], clock: Clock) -> None:
        """
        Args:
            replicas: by number, one at least.
            clock: through which every wait goes.
        """
        self._routes = {number: _Route(number, server) for number, server in replicas.items()}
        self._clock = clock

    def of_one_run(self) -> Callable[[GenerateRequest], Awaitable[GenerateResult]]:
        """What generates for one rollout: its first replica has what was said before in its cache.

        It leaves a replica that is being made anew, or was removed, for another one. A request that fails with an
        update of its replica's weights is generated again, from its beginning, once the update was made again.
        """
        chosen: _Route | None = None

        async def generate(request: GenerateRequest) -> GenerateResult:
            nonlocal chosen
            while True:
                if chosen is None or not chosen.available or self._is_removed(chosen):
                    chosen = self._least_loaded()
                try:
                    with suppress(_Moved):
                        return await self._generate(chosen, request)
                except RolloutError as error:
                    if error.code != "rollout.stale" or not await self._updated(chosen, request):
                        raise

        return generate

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate on the least loaded replica; one that is being made anew only where there is no other.

        Raises:
            RolloutError: ``rollout.stopped``, naming the replica, when it failed and is not healthy any more.
            Exception: what a healthy replica raised.
        """
        return await self.of_one_run()(request)

    async def reroute(self, replicas: Mapping[int, BaseRolloutServer], seconds: float) -> int:
        """Use these replicas from now on; return when no request is left on those that are not among them.

        Args:
            replicas: by number, one at least; one whose number is known stays as it is.
            seconds: for requests on a removed replica to end. Then they are aborted, and generated again elsewhere:
                from their beginning, with the same seed and the whole of their token budget.

        Returns:
            how many were aborted.
        """
        removed = [route for number, route in self._routes.items() if number not in replicas]
        self._routes = {
            number: self._routes.get(number) or _Route(number, server) for number, server in replicas.items()
        }
        aborted = await asyncio.gather(*(self._empty(route, seconds) for route in removed))
        return sum(aborted)

    async def _empty(self, route: _Route, seconds: float) -> int:
        """Wait until a removed replica has no request, or abort what it has."""
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
        except Exception as error:
            if not isinstance(error, WorkerLost):  # that says all there is to say
                await self._require_alive(route, error)
            raise
        finally:
            route.running.discard(task)
            if not route.running:
                route.idle.set()

    async def _updated(self, route: _Route, request: GenerateRequest) -> bool:
        """Wait until a replica has whole weights; whether these are new enough for a request that it has refused.

        Raises:
            DeadlineExceeded: naming the replica.
        """
        name, ends = f"replica {route.number}", self._clock.time() + _UPDATE_SECONDS
        while not self._is_removed(route):
            asked = route.server.health()
            report = await self._clock.wait_for(asked, _HEALTH_SECONDS, f"{name} to tell its health")
            if report.healthy:
                return report.weight_version >= (request.minimum_weight_version or 0)
            if self._clock.time() >= ends:
                raise DeadlineExceeded(
                    f"waited {_UPDATE_SECONDS:g} s for {name} to get weights after an update failed: {report.detail}"
                )
            await self._clock.sleep(_LOOK_SECONDS)
        return True

    def _is_removed(self, route: _Route) -> bool:
        return self._routes.get(route.number) is not route

    def _least_loaded(self) -> _Route:
        return min(self._routes.values(), key=lambda route: (not route.available, len(route.running)))

    async def _require_alive(self, route: _Route, error: Exception) -> None:
        """Tell a request that failed from a replica that died."""
        state = await state_of(route.server, self._clock, f"replica {route.number}", error)
        if state is not None:
            raise RolloutError(
                f"rollout replica {route.number} died",
                code="rollout.stopped",
                where=f"replica {route.number}",
                expected="a replica that answers until the run ends",
                found=f"{_one_line(error)}; its health: {state}",
                fix="look at what the server printed; the traceback is in error.txt in the run's folder",
            ) from error


class _Moved(Exception):
    """A request was aborted because its replica was removed."""


def _is_cancelled() -> bool:
    """Whether the task that asks is to end itself."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _one_line(error: Exception) -> str:
    text = error.message if isinstance(error, JackfieldError) else str(error)
    return " ".join(f"{type(error).__name__}: {text}".split())
