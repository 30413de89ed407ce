"""One replica of a run, through all lives of its process."""

from __future__ import annotations

import asyncio
from typing import Literal

import attrs

from jackfield.abc.rollout import BaseRolloutServer, GenerateRequest, GenerateResult, HealthReport, ServerInfo
from jackfield.clock import Clock
from jackfield.errors import JackfieldError, RolloutError, WorkerLost, described
from jackfield.routing.router import HEALTH_SECONDS, LOST, cause_of_death

State = Literal["starting", "serving", "draining", "restarting", "unhealthy"]


@attrs.define(eq=False)
class Worker:
    """One life of a replica."""

    server: BaseRolloutServer  #: or its stub
    #: here: nothing can replace it; process: another process can; cluster: and the run can recover from its death
    place: Literal["here", "process", "cluster"] = "here"
    lost: asyncio.Future[JackfieldError] = attrs.field(factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def restartable(self) -> bool:
        """Return whether another process can take its place."""
        return self.place != "here"

    def lose(self, error: JackfieldError) -> None:
        """Note how it died; the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(error)


@attrs.frozen(kw_only=True)
class ReplicaState:
    """How a replica is."""

    replica: int
    state: State
    weight_version: int | None = None  #: None: not known
    running: int = 0  #: requests that are decoded now
    waiting: int = 0  #: requests that wait for a place in the batch
    restarts: int = 0  #: times that its process was replaced
    address: str | None = None  #: of its OpenAI-compatible endpoint
    detail: str = ""


@attrs.define(eq=False)
class Replica:
    """A replica of the pool, through all its lives. Agents of this process generate through it."""

    number: int
    clock: Clock
    state: State = "starting"
    restarts: int = 0
    worker: Worker = attrs.field(init=False)
    info: ServerInfo = attrs.field(init=False)
    keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Return its name in messages."""
        return f"rollout replica {self.number}"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample.

        Raises:
            RolloutError: ``rollout.stopped``: the replica has died.
        """
        worker = self.worker
        try:
            return await worker.server.generate(request)
        except Exception as error:
            if await self.is_lost(worker, error):
                raise worker.lost.result() from error
            raise

    async def health(self) -> HealthReport:
        """Report whether the replica can serve."""
        return await self.worker.server.health()

    async def is_lost(self, worker: Worker, error: Exception | None = None) -> bool:
        """Return whether a life of this replica has ended; look at its health where that is not known."""
        if not worker.lost.done():
            cause = await cause_of_death(worker.server, self.clock, self.name, error)
            if cause is not None:
                worker.lose(self._death(worker, cause, error))
        return worker.lost.done()

    def _death(self, worker: Worker, cause: str, error: Exception | None) -> JackfieldError:
        """Make the error of a replica that is not healthy any more."""
        if isinstance(error, JackfieldError) and error.code in LOST:
            return error
        found = f"its health: {cause}" if error is None else f"{described(error)}; its health: {cause}"
        if worker.place == "cluster":
            return WorkerLost(f"{self.name} died", where=self.name, found=found)
        return RolloutError(
            f"{self.name} died",
            code="rollout.stopped",
            where=f"replica {self.number}",
            expected="a replica that answers until the run ends",
            found=found,
            fix="look at what the server printed; the traceback is in error.txt in the run's folder",
        )

    async def describe(self) -> ReplicaState:
        """Return how the replica is."""
        state = ReplicaState(replica=self.number, state=self.state, restarts=self.restarts)
        if self.state not in ("serving", "draining"):
            return state
        state = attrs.evolve(state, address=self.info.openai_base_url)
        try:
            report = await self.clock.wait_for(self.health(), HEALTH_SECONDS, f"{self.name} to tell its health")
        except JackfieldError as error:
            return attrs.evolve(state, state="unhealthy", detail=error.message)
        load = {name: getattr(report, name) for name in ("weight_version", "running", "waiting", "detail")}
        return attrs.evolve(state, state=self.state if report.healthy else "unhealthy", **load)
