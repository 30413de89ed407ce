"""A replica of a run, which keeps its identity when its process is restarted."""

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
    """One life of a replica, from the start of its server to its death."""

    server: BaseRolloutServer  #: the server or its stub
    #: "here": it cannot be replaced; "process": another process can; "cluster": the run can also recover from its death
    place: Literal["here", "process", "cluster"] = "here"
    lost: asyncio.Future[JackfieldError] = attrs.field(factory=lambda: asyncio.get_running_loop().create_future())

    @property
    def restartable(self) -> bool:
        """Return whether another process can replace it."""
        return self.place != "here"

    def lose(self, error: JackfieldError) -> None:
        """Record how it died. Only the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(error)


@attrs.frozen(kw_only=True)
class ReplicaState:
    """The state and load of a replica."""

    replica: int
    state: State
    weight_version: int | None = None  #: None if unknown
    running: int = 0  #: requests that are decoded now
    waiting: int = 0  #: requests that wait to join the server's batch
    restarts: int = 0  #: how often its process was replaced
    address: str | None = None  #: base URL of its OpenAI-compatible endpoint
    detail: str = ""


@attrs.define(eq=False)
class Replica:
    """A replica of the pool through all its lives. Agents in this process call it to generate."""

    number: int
    clock: Clock
    state: State = "starting"
    restarts: int = 0
    worker: Worker = attrs.field(init=False)
    info: ServerInfo = attrs.field(init=False)
    keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Return the replica's name for messages."""
        return f"rollout replica {self.number}"

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Generate one sample.

        Raises:
            RolloutError: ``rollout.stopped`` if the replica has died.
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
        """Return whether a life of this replica has ended; ask for its health if that is unknown."""
        if not worker.lost.done():
            cause = await cause_of_death(worker.server, self.clock, self.name, error)
            if cause is not None:
                worker.lose(self._death(worker, cause, error))
        return worker.lost.done()

    def _death(self, worker: Worker, cause: str, error: Exception | None) -> JackfieldError:
        """Return the error for a replica that is no longer healthy."""
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
        """Return the state and load of the replica."""
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
