"""A replica that outlives its process: made anew with the weights that it had, and its requests generated again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar, cast

import attrs

from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    PauseRequest,
    PauseResult,
    ResumeRequest,
    ResumeResult,
    ServerInfo,
    SleepRequest,
    SleepResult,
    UpdateWeightsRequest,
    WakeUpRequest,
    WakeUpResult,
    WeightReceipt,
)
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError
from jackfield.runtime.generation import shifted_seed
from jackfield.weights import Replica, SyncReport

__all__ = ["LastingServer", "LastingWeights", "state_of"]

T = TypeVar("T")

#: Refusals of one request by a replica that is well.
_REFUSALS = ("rollout.request", "rollout.context-length", "rollout.stale", "plugin.capability")
_HEALTH_SECONDS = 10.0

CatchUp = Callable[[BaseRolloutServer, ServerInfo], Awaitable[object]]


class LastingServer(BaseRolloutServer):
    """Stands for a replica whose process may die.

    When a call fails and the replica is not healthy any more, another is made in its place, started, brought to the
    weights of the others and into the state (paused, asleep) of the one that died; then the call is made again. A
    request is generated from its beginning, with the whole of its token budget; a stream goes on behind the tokens
    that its reader has, with what is left of the budget.

    An update of weights is not made again here: the sender, too, has to begin anew (:class:`LastingWeights`).
    """

    behind = False  #: whether requests are held back, because it has no weights yet

    def __init__(self, make: Callable[[], BaseRolloutServer], *, restarts: int, start_seconds: float) -> None:
        """
        Args:
            make: makes a replica that is not started.
            restarts: how often a replica is made anew; then its death is the error ``rollout.stopped``.
            start_seconds: for a new one to start.
        """
        self._server = make()
        super().__init__(self._server.config, self._server.context)
        self._make = make
        self._restarts = restarts
        self._start_seconds = start_seconds
        self._clock = self.context.clock
        self._name = f"rollout replica {self.context.replica}"
        self._revival: asyncio.Task[None] | None = None
        self._paused: PauseRequest | None = None
        self._asleep: SleepRequest | None = None
        self._stopped = False
        self.info: ServerInfo | None = None  #: of the replica that was started last
        self.catch_up: CatchUp | None = None  #: brings weights to a new replica; None: those of the model's folder do
        self.revived = 0  #: times that it was made anew

    @property
    def available(self) -> bool:
        """Whether a request would be served at once; otherwise another replica is the better choice."""
        return self._revival is None

    # -- life ------------------------------------------------------------------------------------------------------

    async def start(self) -> ServerInfo:
        """Start the first replica. What fails then is no death."""
        self.info = await self._server.start()
        return self.info

    async def stop(self) -> None:
        """Stop whatever is there."""
        self._stopped = True
        revival = self._revival
        if revival is not None:
            revival.cancel()
            await asyncio.gather(revival, return_exceptions=True)
        await self._server.stop()

    async def health(self) -> HealthReport:
        """Of the replica that is there; one that is being made is not healthy."""
        if self._revival is not None:
            return HealthReport(healthy=False, detail="it died, and is started again")
        return await self._server.health()

    # -- calls -----------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample; again, if its replica dies."""
        return await self._lasting(lambda server: server.generate(request))

    def generate_stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        """Generate one sample and yield its tokens as they come; go on behind them, if the replica dies."""
        return self._stream(request)

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[GenerateChunk]:
        while True:
            await self._ready()
            server, seen = self._server, list[int]()
            try:
                stream = cast("AsyncGenerator[GenerateChunk, None]", server.generate_stream(request))
                async with contextlib.aclosing(stream) as chunks:
                    async for chunk in chunks:
                        seen.extend(chunk.token_ids)
                        yield chunk
                return
            except Exception as error:
                await self._revive_or_raise(server, error)
            request = _behind(request, seen)

    async def abort(self, request: AbortRequest) -> AbortResult:
        """End requests; those of a replica that has died have ended."""
        return await self._lasting(lambda server: server.abort(request))

    async def pause(self, request: PauseRequest) -> PauseResult:
        """Stop decoding."""
        result = await self._lasting(lambda server: server.pause(request))
        self._paused = request
        return result

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        """Go on decoding."""
        self._paused = None
        return await self._lasting(lambda server: server.resume(request))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        """Give memory back."""
        result = await self._lasting(lambda server: server.sleep(request))
        self._asleep = request
        return result

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        """Take memory again."""
        if not request.tags or "kv_cache" in request.tags:
            self._asleep = None
        return await self._lasting(lambda server: server.wake_up(request))

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Receive weights; a death is told, and :meth:`revive_if_dead` mends it."""
        await self._ready()
        return await self._server.update_weights(request)

    async def admit(self) -> None:
        """Every weight that it was to have has been acknowledged; whoever holds requests back lets them in."""

    async def revive_if_dead(self, error: JackfieldError) -> bool:
        """Make the replica anew if it is not healthy, without weights: those of the next update are its first.

        Raises:
            RolloutError: ``rollout.stopped``: it has died too often.
        """
        if self._revival is None and (await state_of(self._server, self._clock, self._name)) is None:
            return False
        if self._revival is None:
            self._begin(error, weights=False)
        await self._ready()
        return True

    # -- deaths ----------------------------------------------------------------------------------------------------

    async def _lasting(self, call: Callable[[BaseRolloutServer], Awaitable[T]]) -> T:
        while True:
            await self._ready()
            server = self._server
            try:
                return await call(server)
            except Exception as error:
                await self._revive_or_raise(server, error)

    async def _ready(self) -> None:
        """Wait for a revival that is under way; its deadline is its own."""
        while self._revival is not None:
            await asyncio.shield(self._revival)

    async def _revive_or_raise(self, server: BaseRolloutServer, error: Exception) -> None:
        """Return when there is a replica again; raise what was the request's own failure."""
        if server is not self._server or self._revival is not None:
            return  # somebody else has found out
        state = None if self._stopped else await state_of(server, self._clock, self._name, error)
        if server is not self._server or self._revival is not None:
            return
        if state is None or self._stopped:
            raise error
        self._begin(error, weights=True)

    def _begin(self, error: Exception, weights: bool) -> None:
        self._revival = asyncio.create_task(self._revive(error, weights), name=f"{self._name}, revival")

    async def _revive(self, error: Exception, weights: bool) -> None:
        try:
            if self.revived >= self._restarts:
                raise RolloutError(
                    f"{self._name} died again after {self.revived} restarts",
                    code="rollout.stopped",
                    where=self._name.removeprefix("rollout "),
                    expected="a replica that answers until the run ends",
                    found=error,
                    fix="look at what the server printed; cluster.replica_restarts allows more",
                ) from error
            self.revived += 1
            logging.getLogger("jackfield").warning("%s died and is started again: %s", self._name, error)
            await self._server.stop()
            self._server = server = self._make()
            starting = f"{self._name} to start again"
            self.info = info = await self._clock.wait_for(server.start(), self._start_seconds, starting)
            if weights and self.catch_up is not None:
                await self.catch_up(server, info)
            if self._paused is not None:
                await server.pause(attrs.evolve(self._paused, mode="keep"))
            if self._asleep is not None:
                await server.sleep(self._asleep)
        finally:
            self._revival = None


class _Weights(Protocol):
    async def sync(self, version: int) -> SyncReport:
        """Bring a version to every replica."""


class LastingWeights:
    """A synchronisation that is made again when a replica has died in it."""

    def __init__(self, weights: _Weights, replicas: Sequence[Replica]) -> None:
        """
        Args:
            weights: what synchronises.
            replicas: read at the beginning of each synchronisation.
        """
        self._weights = weights
        self._replicas = replicas

    async def sync(self, version: int) -> SyncReport:
        """Bring ``version`` to every replica, those included that are made anew for it.

        Raises:
            RolloutError: ``rollout.stopped``: a replica has died too often.
            JackfieldError: what failed although every replica is well.
        """
        servers = [each.server for each in self._replicas if isinstance(each.server, LastingServer)]
        while True:
            before = [server.revived for server in servers]
            try:
                report = await self._weights.sync(version)
            except JackfieldError as error:
                revived = [await server.revive_if_dead(error) for server in servers]
                if not any(revived) and before == [server.revived for server in servers]:
                    raise
                continue
            for server, count in zip(servers, before, strict=True):
                if server.revived == count:
                    await server.admit()
            return report


async def state_of(replica: BaseRolloutServer, clock: Clock, name: str, error: Exception | None = None) -> str | None:
    """How a replica is that does not serve any more; None: it is well.

    Args:
        replica: whose.
        clock: through which its answer is waited for.
        name: of the replica.
        error: of a request that it has failed; one that it has refused says that it is well.
    """
    if isinstance(error, JackfieldError) and error.code in _REFUSALS:
        return None
    try:
        report = await clock.wait_for(replica.health(), _HEALTH_SECONDS, f"{name} to tell its health")
    except Exception as silence:
        return f"{type(silence).__name__}: {silence}"
    return None if report.healthy else report.detail or "not healthy"


def _behind(request: GenerateRequest, seen: Sequence[int]) -> GenerateRequest:
    """What is left of a request after some of its tokens; random numbers are not used twice."""
    if not seen:
        return request
    sampling = request.sampling
    left = attrs.evolve(
        sampling,
        max_new_tokens=sampling.max_new_tokens - len(seen),
        seed=None if sampling.seed is None else shifted_seed(sampling.seed, len(seen)),
    )
    return attrs.evolve(request, prompt_ids=(*request.prompt_ids, *seen), sampling=left)
