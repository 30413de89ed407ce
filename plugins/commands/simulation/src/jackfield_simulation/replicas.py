"""Parts of a simulated run that take time: replicas behind real connections, the sender of their weights, rewards."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context, copy_context
from functools import partial
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentLoopBase, AgentLoopOutput
from jackfield.abc.checkpoint_engine import Topology
from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.abc.rollout import (
    AbortRequest,
    AbortResult,
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
    WorkerReceipt,
)
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.config import RunConfig
from jackfield.errors import JackfieldError, RolloutError, WeightsError
from jackfield.routing import Replica, Router
from jackfield.runtime.agents import AgentHost, no_model
from jackfield.runtime.process import ROLLOUT, death, use_process
from jackfield.sdk.rpc import Connection, Service
from jackfield.weights import PreparedSender
from jackfield_simulation.world import RANK, World

_SECONDS = 1e6  #: of a call; the run's own deadlines are shorter


@attrs.define(eq=False)
class Response:
    """A response that an agent asks for. Its tokens are their positions, so that lost and repeated ones are seen."""

    place: tuple[int, int, int, str]  #: batch, group, rollout, and what is repeated there
    length: int  #: tokens to the model's own end
    pace: float  #: seconds per token
    versions: dict[int, int] = attrs.field(factory=dict)  #: weights that generated each token last, by position


@attrs.define(eq=False)
class _Part:
    """What a server generates of a response."""

    request: GenerateRequest
    response: Response
    count: int  #: tokens to generate
    progress: float = 0.0  #: of them
    versions: list[int] = attrs.field(factory=list)
    aborted: bool = False

    def advance(self, version: int, tokens: float) -> None:
        """Take the tokens that began in some time, with one version."""
        self.progress = min(self.progress + tokens, self.count)
        first = len(self.request.prompt_ids)
        while len(self.versions) < math.ceil(self.progress - 1e-6):
            self.response.versions[first + len(self.versions)] = version
            self.versions.append(version)

    def result(self) -> GenerateResult:
        """Return the tokens so far."""
        first = len(self.request.prompt_ids)
        ids = tuple(range(first, first + len(self.versions)))
        ends = first - 1 + len(ids) == self.response.length
        return GenerateResult(
            request_id=self.request.request_id,
            token_ids=ids,
            log_probs=tuple(-float(each) for each in ids),
            weight_versions=tuple(self.versions),
            finish_reason="stop" if ends else "length" if len(ids) == self.count else "abort",
        )


@attrs.define(eq=False)
class Server:
    """A rollout server in its process. It keeps decoding during a transfer, and stands still to load the weights."""

    number: int
    replicas: Replicas
    slots: asyncio.Semaphore
    version: int = 0
    updating: bool = False
    stale: bool = False  #: an update has failed
    decoding: int = 0  #: number of responses
    still: set[str] = attrs.field(factory=set)  #: reasons to stand still
    parts: dict[str, _Part] = attrs.field(factory=dict)
    _changed: asyncio.Future[None] = attrs.field(factory=asyncio.Future)

    def _change(self, *, ends: bool = False) -> None:
        """Let each running request look at the server's state; ``ends``: those that cannot be kept end."""
        for part in self.parts.values() if ends and not self.replicas.world.settings.keeps else ():
            part.aborted = True
        changed, self._changed = self._changed, asyncio.Future()
        changed.set_result(None)

    async def start(self) -> ServerInfo:
        world = self.replicas.world
        await world.clock.sleep(world.settings.times.draw("start", world.seed, self.number))
        return ServerInfo(replica=self.number)

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self.replicas.check_turns(self, asked=True)
        response, made = self.replicas.responses[request.request_id], len(request.prompt_ids) - 1
        part = _Part(request, response, min(response.length - made, request.sampling.max_new_tokens))
        self.parts[request.request_id] = part
        try:
            async with self.slots:
                await self._decode(part)
        finally:
            del self.parts[request.request_id]
        return part.result()

    async def _decode(self, part: _Part) -> None:
        world, (batch, group, *_), pace = self.replicas.world, part.response.place, part.response.pace
        while part.progress < part.count and not part.aborted:
            if self.stale:
                raise RolloutError("an update has failed", code="rollout.stale")
            if self.still:
                await asyncio.wait([self._changed])
                continue
            work = asyncio.ensure_future(world.take("generate", (part.count - part.progress) * pace, batch, group))
            self.decoding += 1
            try:
                while not (work.done() or self.still or self.stale or part.aborted):
                    version, began = self.version, world.clock.now
                    await asyncio.wait([work, self._changed], return_when=asyncio.FIRST_COMPLETED)
                    part.advance(version, part.count if work.done() else (world.clock.now - began) / (pace or 1.0))
            finally:
                self.decoding -= 1
                work.cancel()

    async def abort(self, request: AbortRequest) -> AbortResult:
        names = tuple(name for name in request.request_ids if name in self.parts)
        for name in names:
            self.parts[name].aborted = True
        self._change()
        return AbortResult(request_ids=names)

    async def pause(self, request: PauseRequest) -> PauseResult:
        self.still.add("paused")
        self._change(ends=True)
        return PauseResult(running=len(self.parts))

    async def resume(self, request: ResumeRequest) -> ResumeResult:
        self.still.discard("paused")
        self._change()
        return ResumeResult(running=len(self.parts))

    async def sleep(self, request: SleepRequest) -> SleepResult:
        self.replicas.check_idle("it goes to sleep", self)
        self.still.add("asleep")
        return SleepResult()

    async def wake_up(self, request: WakeUpRequest) -> WakeUpResult:
        if "weights" not in request.tags:
            self.still.discard("asleep")
            self._change()
        return WakeUpResult()

    async def update_weights(self, request: UpdateWeightsRequest) -> WeightReceipt:
        """Take the weights that the sender has sent, and stand still while they load."""
        world, number = self.replicas.world, self.number
        self.updating = True
        self.replicas.check_turns(self, asked=False)
        try:
            digests = await self.replicas.sender.sent
            if seconds := world.settings.times.draw("load", world.seed, request.version, number):
                self.still.add("loads")
                self._change(ends=True)
                await world.clock.sleep(seconds)
        except BaseException:
            self.stale = True
            raise
        else:
            self.version, self.stale = request.version, False
        finally:
            self.updating = False
            self.still.discard("loads")
            self._change(ends=True)
        workers = (WorkerReceipt(worker=0, digests=digests),)
        return WeightReceipt(version=request.version, replica=self.number, workers=workers)

    async def health(self) -> HealthReport:
        return HealthReport(healthy=not self.stale, running=len(self.parts), weight_version=self.version)

    async def stop(self) -> None:
        return


@attrs.define(eq=False)
class _Pipe:
    """The transport of one end of a connection. Faults delay, repeat or prevent what a replica writes."""

    replicas: Replicas
    number: int | None  #: of the replica that writes; None: the run writes to it
    other: Connection
    context: Context = attrs.field(factory=copy_context)

    def write(self, data: bytes) -> None:
        loop, world, late, repeated = asyncio.get_running_loop(), self.replicas.world, 0.0, False
        if self.number is not None:
            condition = world.condition(("replica", self.number))
            late, condition.late = condition.late, 0.0
            repeated = world.repeats(("replica", self.number))
        send = partial(loop.call_later, late) if late else loop.call_soon
        for _ in range(1 + repeated):
            send(self.other.data_received, data, context=self.context)

    def close(self) -> None:
        if self.number is None:  # the end of a replica is found by the world
            asyncio.get_running_loop().call_soon(self.other.connection_lost, None, context=self.context)

    def get_extra_info(self, name: str) -> None:
        return


@attrs.define(eq=False)
class Sender:
    """Sends weights to replicas: all of a transfer, or nothing."""

    world: World
    turns: int  #: transfers of a weight sync
    sent: asyncio.Future[Mapping[str, str]] = attrs.field(factory=asyncio.Future)

    async def prepare(self) -> PreparedSender:
        self.sent = asyncio.Future()
        return PreparedSender(metadata={})

    async def build_topology(self, request: Any) -> Topology:
        return Topology(trainer=({},), rollout=({},) * request.rollout_workers)

    async def transfer(self, place: object, version: int, base: int | None) -> tuple[dict[str, str], int]:
        await self.world.guard(RANK, self.world.spend("sync", version, share=1 / self.turns))
        digests = {"weights": f"{version}"}
        self.sent.set_result(digests)
        return digests, 0

    async def finalize(self) -> None:
        if not self.sent.done():
            self.sent.set_exception(WeightsError("the sender has left"))
            self.sent.exception()


@attrs.define(eq=False)
class Replicas:
    """Where the replicas of one life of a run are, and the routers of its agent workers."""

    world: World
    config: RunConfig
    sender: Sender
    pool: ReplicaPool = attrs.field(init=False)
    routers: dict[int, Router] = attrs.field(factory=dict)  #: by agent worker
    servers: dict[int, Server] = attrs.field(factory=dict)
    responses: dict[str, Response] = attrs.field(factory=dict)  #: by request
    restarts: int = 0
    _routes: tuple[Mapping[int, Replica], Sequence[int]] = ({}, ())
    _ends: dict[int, Connection] = attrs.field(factory=dict)

    async def start(self, replica: Replica) -> None:
        """Make a replica's server, in a new process."""
        number, place = replica.number, "process" if self.config.cluster.name == "inline" else "cluster"
        if number in self._ends:
            self.restarts += 1
            self._ends[number].end("is replaced")

        def lost(how: str) -> JackfieldError:
            if place == "cluster":
                return death(replica.name, replica.name, f"it {how}")
            return replica.stopped("is not running", f"it {how}", "look at the trace")

        self.world.renew(("replica", number))
        server = self.servers[number] = Server(number, self, asyncio.Semaphore(self.world.settings.slots))
        service = {"worker": Service(target=server, contract=ROLLOUT)}
        near: Any = Connection(replica.name, {}, self.world.clock, lost_error=lost)
        far: Any = Connection("the run", service, self.world.clock)
        near.connection_made(_Pipe(self, None, far))
        far.connection_made(_Pipe(self, number, near))
        self._ends[number] = near
        self.world.condition(("replica", number)).stopped.add_done_callback(
            lambda _: far.lost.done() or far.end("died")
        )
        self.world.restarts["replica", number] = lambda: near.end("has died")
        use_process(replica, near, place, _SECONDS)  # type: ignore[arg-type]

    async def end(self, number: int) -> None:
        return

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        """Route the requests of every agent worker."""
        self._routes = dict(replicas), updating
        return sum(await asyncio.gather(*(each.route(replicas, seconds, updating) for each in self.routers.values())))

    def router(self, agent: int) -> Router:
        """Return the router of an agent worker that starts."""
        made = self.routers[agent] = Router(self.world.clock)
        asyncio.ensure_future(made.route(self._routes[0], 0.0, self._routes[1]))  # noqa: RUF006 - it waits for nothing
        return made

    def close(self) -> None:
        """End all processes."""
        for each in self._ends.values():
            each.end("is closed")

    async def respond(self, generate: Any, request: GenerateRequest, response: Response) -> GenerateResult:
        """Let a router generate a response, and check that it has the tokens of one request, with their versions."""
        self.responses[request.request_id] = response
        result: GenerateResult = await generate(request)
        del self.responses[request.request_id]
        count = min(response.length, request.sampling.max_new_tokens)
        ids = tuple(range(1, count + 1))
        if (result.token_ids, result.log_probs) != (ids, tuple(-float(each) for each in ids)):
            what = f"{request.request_id} has tokens {result.token_ids} of {count}"
            self.world.breach("a response has its tokens and no more", what)
        elif result.weight_versions != tuple(map(response.versions.__getitem__, ids)):
            what = f"{request.request_id} has {result.weight_versions}, generated with {response.versions}"
            self.world.breach("a token has its version", what)
        return result

    # -- the invariants

    def check_turns(self, server: Server, *, asked: bool) -> None:
        """With ``weights.in_turns`` a replica serves, and gets the requests, unless one is dead or restarted."""
        if not (self.config.weights.in_turns and server.updating and len(self.servers) > 1):
            return
        lives = [number for number, each in self.servers.items() if self._serves(number) and not each.stale]
        free = [number for number in lives if not self.servers[number].updating]
        if free if asked else len(lives) == len(self.servers) and not free:
            found = f"replica {server.number} gets a request" if asked else "every replica is updated"
            self.world.breach("a replica serves during an update", found)

    def _serves(self, number: int) -> bool:
        stopped = self.world.condition(("replica", number)).stopped.done()
        return not stopped and self.pool.replicas[number].state == "serving"

    def check_idle(self, what: str, *servers: Server) -> None:
        """On shared devices, replicas and engine compute at different times."""
        if busy := [each.number for each in servers or self.servers.values() if each.decoding]:
            self.world.breach("devices are shared in turns", f"replicas {busy} generate while {what}")


class Agent(AgentLoopBase):
    """An agent loop whose answers take time, as its settings, a function of the simulation, say."""

    async def run(self, sampling_params: Mapping[str, Any], **fields: Any) -> AgentLoopOutput:
        answered: AgentLoopOutput = await self.config(self.context.generate, sampling_params)
        return answered


def agent_host(answer: Callable[..., Awaitable[AgentLoopOutput]], router: Router, clock: Clock) -> AgentHost:
    """Return the host of loops that answer so, with the replicas of a router."""
    nothing: Any = None
    context = AgentContext(generate=no_model, tokenizer=nothing, clock=clock)
    return AgentHost(make=partial(Agent, answer), generator=router.of_one_rollout, context=context)


class Reward(RewardAgent):
    """Scores with a function."""

    def __init__(self, score: Callable[[ScoreRequest], Awaitable[ScoreResult]], clock: Clock) -> None:
        super().__init__(None, RewardContext(clock=clock))
        self._score = score

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample."""
        return await self._score(request)
