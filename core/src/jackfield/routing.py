"""Replicas of a run, and the router that chooses one for each request."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import cached_property
from typing import Any, Literal, cast

import attrs
import xxhash

from jackfield.abc.rollout import (
    AbortRequest,
    BaseRolloutServer,
    GenerateChunk,
    GenerateRequest,
    GenerateResult,
    HealthReport,
    SamplingParams,
    ServerInfo,
)
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RolloutError, RpcError, WorkerLost, described

Hear = Callable[[GenerateChunk], None]  #: gets the tokens of a request as they come
State = Literal["starting", "serving", "draining", "restarting", "unhealthy"]

LOST = ("rollout.stopped", "worker.died")  #: codes of errors which mean that a replica has died

#: Codes by which a healthy replica refuses a single request.
_REFUSALS = ("rollout.request", "rollout.context-length", "rollout.stale", "plugin.capability")
_HEALTH_SECONDS = 10.0  #: for a replica to report its health
_ABORT_SECONDS = 10.0  #: for a removed replica to return the tokens of unfinished requests
_WAIT_SECONDS = 3600.0  #: for a replica that serves; the pool's own deadlines are shorter
_UPDATE_SECONDS = 600.0  #: for a failed weight update to be repeated
_LOOK_SECONDS = 0.1  #: between two checks whether it was repeated
_LISTS = ("token_ids", "log_probs", "weight_versions")  #: of a result, by token
_CONTEXT = 8  #: tokens before a stop text with which it is decoded


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
    """A rollout server of a run, from its start to its death. A restart makes another replica of the same number."""

    server: BaseRolloutServer = attrs.field(default=cast(Any, None))  #: the server or its stub, once it is made
    info: ServerInfo = attrs.field(default=cast(Any, None))  #: set when the server has started
    number: int = attrs.field(kw_only=True)
    clock: Clock = attrs.field(factory=Clock, kw_only=True)
    state: State = attrs.field(default="starting", kw_only=True)
    restarts: int = attrs.field(default=0, kw_only=True)
    #: "here": it cannot be replaced; "process": another process can; "cluster": the run can also recover from its death
    place: Literal["here", "process", "cluster"] = attrs.field(default="here", kw_only=True)

    @number.default
    def _number_of_server(self) -> int:
        return self.info.replica

    @property
    def name(self) -> str:
        """Return the replica's name for messages."""
        return f"rollout replica {self.number}"

    @cached_property
    def lost(self) -> asyncio.Future[JackfieldError]:
        """Return the future error that tells how the replica died."""
        return asyncio.get_running_loop().create_future()

    def lose(self, error: JackfieldError) -> None:
        """Record how it died. Only the first reason counts."""
        if not self.lost.done():
            self.lost.set_result(error)

    async def is_lost(self, error: Exception | None = None) -> bool:
        """Return whether the replica has died; ask for its health if that is unknown.

        ``error`` is that of a failed request. A mere refusal of the request means that the replica is healthy.
        """
        refuses = isinstance(error, JackfieldError) and error.code in _REFUSALS
        if self.lost.done() or refuses:
            return self.lost.done()
        try:
            report = await self.health()
            cause = None if report.healthy else report.detail or "not healthy"
        except Exception as silence:
            cause = f"{type(silence).__name__}: {silence}"
        if cause is not None:
            self.lose(self._death(cause, error))
        return cause is not None

    def _death(self, cause: str, error: Exception | None) -> JackfieldError:
        if isinstance(error, JackfieldError) and error.code in LOST:
            return error
        found = f"its health: {cause}" if error is None else f"{described(error)}; its health: {cause}"
        if self.place == "cluster":
            return WorkerLost(f"{self.name} died", where=self.name, found=found)
        fix = "look at what the server printed; the traceback is in error.txt in the run's folder"
        return self.stopped("died", found, fix)

    def stopped(self, how: str, found: object, fix: str) -> RolloutError:
        """Return the error ``rollout.stopped`` of this replica."""
        where, expected = f"replica {self.number}", "a replica that answers until the run ends"
        message = f"{self.name} {how}"
        return RolloutError(message, code="rollout.stopped", where=where, expected=expected, found=found, fix=fix)

    async def generate(self, request: GenerateRequest, hear: Hear | None = None) -> GenerateResult | None:
        """Generate one sample, and return it; or have it heard as it comes, and return None.

        Raise ``rollout.stopped`` if the replica has died; ``rollout.request`` if the request cannot go to its process.
        """
        try:
            if hear is None:
                return await self.server.generate(request)
            async with aclosing(cast(Any, self.server.generate_stream(request))) as chunks:
                async for chunk in chunks:
                    hear(chunk)
            return None
        except Exception as error:
            if isinstance(error, RpcError) and error.code == "rpc.value":
                details: Any = {"expected": "plain values, and integers of 64 bits", "found": error.found}
                raise RolloutError(error.message, code="rollout.request", where=error.where, **details) from error
            # in a cluster, the replica's process looks at its health itself
            if self.place != "cluster" and await self.is_lost(error):
                raise self.lost.result() from error
            raise

    async def health(self) -> HealthReport:
        """Report within 10 s whether the replica can serve."""
        return await self.clock.wait_for(self.server.health(), _HEALTH_SECONDS, f"{self.name} to tell its health")

    async def describe(self) -> ReplicaState:
        """Return the state and load of the replica."""
        state = ReplicaState(replica=self.number, state=self.state, restarts=self.restarts)
        if self.state not in ("serving", "draining"):
            return state
        state = attrs.evolve(state, address=self.info.openai_base_url)
        try:
            report = await self.health()
        except JackfieldError as error:
            return attrs.evolve(state, state="unhealthy", detail=error.message)
        load = {name: getattr(report, name) for name in ("weight_version", "running", "waiting", "detail")}
        return attrs.evolve(state, state=self.state if report.healthy else "unhealthy", **load)


def joined_experts(first: Any, second: Any) -> Any:
    """Return the experts of tokens ``[tokens, layers, experts]`` of which both parts may know some; the first counts.

    The second part begins with the first one's tokens. None: nothing is known.
    """
    if first is None or second is None:
        return second if first is None else first
    import numpy as np

    return np.concatenate([first, second[len(first) :]])


def _whole(request: GenerateRequest, chunks: Sequence[GenerateChunk]) -> GenerateResult:
    """Return what came of a request, also if its replica has died before the end."""
    lists: dict[str, Any] = {name: tuple(one for each in chunks for one in getattr(each, name)) for name in _LISTS}
    ended = bool(lists["token_ids"]) and lists["token_ids"][-1] in request.sampling.stop_token_ids
    reason = chunks[-1].finish_reason or ("stop" if ended else "abort")
    return GenerateResult(request_id=request.request_id, finish_reason=reason, **lists)


def _rest(request: GenerateRequest, done: GenerateResult) -> GenerateRequest:
    """Return the request for what is left of one: with its tokens so far, fewer to generate, and a seed for them."""
    sampling, count = request.sampling, len(done.token_ids)
    if not count:
        return request
    seed = None if sampling.seed is None else xxhash.xxh3_64_intdigest(f"{sampling.seed}/{count}".encode()) >> 1
    sampling = attrs.evolve(sampling, max_new_tokens=sampling.max_new_tokens - count, seed=seed)
    return attrs.evolve(request, prompt_ids=(*request.prompt_ids, *done.token_ids), sampling=sampling)


@attrs.define(eq=False)
class Router:
    """Sends a rollout's requests to one replica, the least loaded at its first turn."""

    _clock: Clock
    _decode: Callable[[Sequence[int]], str] = lambda _: ""  #: returns tokens as text, to find stop texts
    _replicas: dict[int, Replica] = attrs.field(factory=dict, init=False)  #: requests wait while this is empty
    _updating: Sequence[int] = attrs.field(default=(), init=False)  #: get new requests only if no other can serve
    #: requests by replica, also by those that were removed
    _running: defaultdict[Replica, set[asyncio.Task[GenerateResult | None]]] = attrs.field(
        factory=lambda: defaultdict(set), init=False
    )
    _changed: asyncio.Event = attrs.field(factory=asyncio.Event, init=False)

    def of_one_rollout(
        self, asks: Callable[[SamplingParams], None] = lambda _: None
    ) -> Callable[..., Awaitable[GenerateResult]]:
        """Return a function that generates for one rollout, on one replica for its cache.

        ``asks`` is called with the sampling parameters of each request. A second argument hears each token as it comes.

        A request that a server aborts, for training, an update or a removal, continues on any replica with its tokens
        and the rest of its budget, and its parts are joined. If the replica dies, the request continues with the tokens
        of its complete parts, and with all that was heard. If a weight update fails and the request with it, the
        request is repeated after the next update; one that needs newer weights goes to a replica that has them. Other
        errors are raised.
        """
        chosen: Replica | None = None

        async def generate(request: GenerateRequest, hear: Hear | None = None) -> GenerateResult:
            nonlocal chosen
            asks(request.sampling)
            chunks = list[GenerateChunk]()

            def heard(chunk: GenerateChunk) -> None:
                chunks.append(chunk)
                cast(Hear, hear)(chunk)

            old, none = set[Replica](), dict[str, Any].fromkeys(_LISTS, ())
            done = GenerateResult(request_id=request.request_id, finish_reason="abort", **none)
            while done.finish_reason == "abort":
                while not self._replicas:
                    await self._clock.wait_for(self._changed.wait(), _WAIT_SECONDS, "a rollout replica that serves")
                chosen, part = self._chosen(chosen, old), None
                chunks.clear()
                try:
                    part = await self._generate(chosen, _rest(request, done), None if hear is None else heard)
                except JackfieldError as error:
                    if error.code in LOST:
                        if not self._is_removed(chosen):
                            del self._replicas[chosen.number]  # the pool's next table decides about it
                    elif error.code != "rollout.stale":
                        raise
                    elif not await self._is_updated(chosen, request):
                        old.add(chosen)
                        if old.issuperset(self._replicas.values()):
                            raise
                part = _whole(request, chunks) if chunks else part
                done = done if part is None else self._joined(request, done, part)
            return done

        return generate

    def _chosen(self, before: Replica | None, old: Collection[Replica]) -> Replica:
        """Return the replica for a request: the one ``before``, or the least loaded; not with ``old`` weights."""
        able = [each for each in self._replicas.values() if each not in old] or list(self._replicas.values())
        able = [each for each in able if each.number not in self._updating] or able
        return before if before in able else min(able, key=lambda replica: len(self._running[replica]))

    def _joined(self, request: GenerateRequest, done: GenerateResult, part: GenerateResult) -> GenerateResult:
        """Return two parts of a request's tokens as one result, up to a stop text that is in both parts."""
        if not done.token_ids and part.finish_reason != "abort":
            return part
        lists: dict[str, Any] = {name: (*getattr(done, name), *getattr(part, name)) for name in _LISTS}
        ids, first, reason, stops = lists["token_ids"], len(done.token_ids), part.finish_reason, request.sampling.stop
        longest = max((len(text.encode()) for text in stops), default=0) if first else 0
        for end in range(first + 1, min(first + longest, len(ids)) + 1):
            text = self._decode(ids[max(end - longest - _CONTEXT, 0) : end])
            if any(each in text for each in stops):
                lists, reason = {name: values[:end] for name, values in lists.items()}, "stop"
                break
        if reason == "abort" and len(ids) >= request.sampling.max_new_tokens:
            reason = "length"
        experts = joined_experts(done.routed_experts, part.routed_experts)
        if experts is not None:
            experts = experts[: len(request.prompt_ids) + len(lists["token_ids"]) - 1]
        return attrs.evolve(part, finish_reason=reason, routed_experts=experts, **lists)

    async def route(self, replicas: Mapping[int, Replica], seconds: float, updating: Sequence[int] = ()) -> int:
        """Use these replicas (by number) from now on; return when no request is left on removed ones.

        Requests on a removed replica have ``seconds`` to end. The rest continue elsewhere; return how many. Replicas
        that are ``updating`` keep their requests, and get new ones only if no other replica can serve.
        """
        removed = [replica for replica in self._running if replica not in replicas.values()]
        self._replicas, self._updating = dict(replicas), updating
        self._changed.set()
        self._changed = asyncio.Event()
        return sum(await asyncio.gather(*(self._empty(replica, seconds) for replica in removed)))

    async def _empty(self, replica: Replica, seconds: float) -> int:
        """Wait until a removed replica has no requests, and move those that take too long, with their tokens."""
        if not (running := self._running.pop(replica, None)):  # none, or another call waits for them
            return 0
        _, late = await asyncio.wait(set(running), timeout=seconds)
        if late and seconds:  # otherwise it has died
            request = AbortRequest(request_ids=tuple(task.get_name() for task in late))
            with suppress(Exception):
                aborting = replica.server.abort(request)
                await self._clock.wait_for(aborting, _ABORT_SECONDS, f"{replica.name} to abort requests")
                await asyncio.wait(late, timeout=_ABORT_SECONDS)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
        return len(late)

    async def _generate(self, replica: Replica, request: GenerateRequest, hear: Hear | None) -> GenerateResult | None:
        """Generate on a replica; return None if the tokens were heard, or its removal aborted the request."""
        generating = replica.generate(request, hear)
        task, running = asyncio.create_task(generating, name=request.request_id), self._running[replica]
        running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self._is_removed(replica) and task.cancelled() and not (own and own.cancelling()):
                return None
            raise
        finally:
            running.discard(task)

    async def _is_updated(self, replica: Replica, request: GenerateRequest) -> bool:
        """Wait until a replica has complete weights, under a deadline; return whether they are new enough."""
        ends = self._clock.time() + _UPDATE_SECONDS
        while not self._is_removed(replica):
            report = await replica.health()
            if report.healthy:
                return report.weight_version >= (request.minimum_weight_version or 0)
            if self._clock.time() >= ends:
                what = f"{replica.name} to get weights after an update failed: {report.detail}"
                raise DeadlineExceeded(f"waited {_UPDATE_SECONDS:g} s for {what}")
            await self._clock.sleep(_LOOK_SECONDS)
        return True

    def _is_removed(self, replica: Replica) -> bool:
        return self._replicas.get(replica.number) is not replica
