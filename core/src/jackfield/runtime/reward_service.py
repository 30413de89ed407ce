"""The reward service: calls of a reward agent within limits, again after failures, and never for what is known."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TypeAlias

import attrs
import msgspec
import xxhash

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock, too_late
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.errors import DeadlineExceeded, JackfieldError, RewardError, described
from jackfield.runtime.reward_limits import CALL, Breaker, Call, Limits, RewardCache
from jackfield.runtime.tags import not_finite

Results: TypeAlias = list[ScoreResult]
_CALL_FIELDS = {"idempotency_key", "retry", "deadline_seconds", "priority", "group_id"}
_CONTENT = tuple(field.name for field in attrs.fields(ScoreRequest) if field.name not in _CALL_FIELDS)
_UNAVAILABLE = ("reward.http", "reward.unavailable", "rpc.lost")  #: codes of errors that breakers count


class RewardService(RewardAgent):
    """Owns the life of all calls of a reward agent; itself an agent that keeps deadlines and never raises.

    ``limits`` are those that the agent's context has; None: limits of its own. Scores are cached if the settings name a
    folder and the agent has a version; ``identity`` has name and settings of the agent. ``http`` is closed with it.
    """

    def __init__(
        self,
        agent: RewardAgent,
        settings: RewardServiceConfig,
        clock: Clock,
        *,
        identity: Any = "",
        limits: Limits | None = None,
        cache: RewardCache | None = None,
        http: Any = None,
        seed: int = 0,
    ) -> None:
        super().__init__(settings, RewardContext(clock=clock, seed=seed))
        self.agent, self.limits = agent, limits or Limits(settings, clock)
        self._bound()
        self._name = f"the reward {type(agent).__name__}"
        self._breaker = Breaker(settings, clock, self._name)
        self._cache, self._identity, self._http = cache, identity, http
        self._flying: dict[bytes, asyncio.Task[Results]] = {}  #: calls that others with the same content wait for
        self._random = random.Random(seed)
        self._calls = self._hedges = 0
        self.ended = 0  #: number of tries that have ended, so that a caller sees progress

    @property
    def compares(self) -> bool:
        """Return whether the agent compares groups."""
        return self.agent.compares

    @property
    def version(self) -> str | None:
        """Return the agent's version."""
        return self.agent.version

    @property
    def generates(self) -> bool:
        """Return whether the agent generates with the run's replicas."""
        return self.agent.generates

    @property
    def keeps_deadlines(self) -> bool:
        """Return true: it counts execution alone."""
        return True

    def _bound(self) -> None:
        most = (self.config.concurrency, None if self.agent.takes_turns else self.agent.concurrency)
        self.limits.most = min((each for each in most if each is not None), default=None)

    async def start(self) -> None:
        """Start the agent, which knows then how many calls it handles."""
        await self.agent.start()
        self._bound()

    async def close(self) -> None:
        """Close the agent, the cache and the timers."""
        self.limits.close()
        try:
            await self.agent.close()
        finally:
            if self._http is not None:
                await self._http.close()
            if self._cache is not None:
                self._cache.close()
                self._cache = None

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score a sample; a failure is a status."""

        async def call(requests: Sequence[ScoreRequest]) -> Results:
            return [await self.agent.compute_score(requests[0])]

        return (await self._known((request,), call))[0]

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score a group, whole if the agent compares."""
        if not self.compares:
            return await super().score_group(requests)

        async def call(asked: Sequence[ScoreRequest]) -> Results:
            return list(await self.agent.score_group(asked))

        return await self._known(tuple(requests), call)

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Have the agent adjust the scores of a group, in a turn if its own are few; an error fails all of it."""
        kind = type(self.agent)
        own = (kind.finish_group, kind.post_process_scores)
        if not requests or own == (RewardAgent.finish_group, RewardAgent.post_process_scores):
            return scores

        async def call(asked: Sequence[ScoreRequest]) -> Results:
            return list(await self.agent.finish_group(asked, scores))

        mine = Call((requests[0].priority, requests[0].group_id), CALL.get())
        few = self.agent.concurrency is not None and not self.agent.takes_turns
        async with self.limits.turn(mine) if few else nullcontext():
            return await self._called(requests, call, mine)

    async def _known(self, requests: tuple[ScoreRequest, ...], call: _Function) -> Results:
        """Return the results that the cache has, or that an equal call in flight gets, or call the agent."""
        if self._cache is None or (keys := self._keys(requests)) is None:
            return await self._scored(requests, call)
        if (found := self._cache.get(keys)) is not None:
            self.limits.count("cached", len(found))
            return found
        flying, place = self._flying, b"".join(keys)
        while (other := flying.get(place)) is not None:
            await asyncio.wait([other])
            if not other.cancelled() and all(each.status == "ok" for each in other.result()):
                self.limits.count("cached", len(requests))
                return [attrs.evolve(each, is_cached=True) for each in other.result()]
        flying[place] = task = asyncio.ensure_future(self._scored(requests, call))
        try:
            results = await task
        finally:
            task.cancel()
            del flying[place]
        if self._cache is not None and all(each.status == "ok" for each in results):
            self._cache.put(zip(keys, results, strict=True))
        return results

    def _keys(self, requests: Sequence[ScoreRequest]) -> list[bytes] | None:
        """Return the cache keys of the results of a call, or None if they cannot be kept."""
        if (version := self.agent.version) is None:
            return None
        try:
            contents = [msgspec.json.encode([getattr(each, name) for name in _CONTENT]) for each in requests]
            head = msgspec.json.encode([self._identity, version])
        except (TypeError, ValueError):  # a task with values of other types
            return None
        whole = b"\0".join([head, *contents])
        return [xxhash.xxh3_128_digest(whole + b"\0%d" % number) for number in range(len(requests))]

    async def _scored(self, requests: tuple[ScoreRequest, ...], call: _Function) -> Results:
        """Call the agent until there are scores, no tries are left, or another try is useless."""
        settings, clock, tries, first = self.config, self.context.clock, 0, None
        order = (requests[0].priority, requests[0].group_id)
        while True:
            asked = tuple(attrs.evolve(each, retry=each.retry + tries) for each in requests) if tries else requests
            results = await self._attempt(asked, call, Call(order, CALL.get()))
            failed = [each for each in results if each.status != "ok" and not each.is_final]
            now = clock.time()
            first = now if first is None else first  # failure
            left = settings.outage_seconds - (now - first)
            held = self._breaker.is_open and all(each.is_unavailable for each in failed)  # not this sample's fault
            patient = settings.on_failure == "retry" and left > 0
            if not failed or not (tries < settings.retries or patient or held):
                return results
            asked_for = max((each.retry_after or 0.0 for each in failed), default=0.0)
            if asked_for > left:
                late = f"; the service asks for {asked_for:g} s, and {max(left, 0.0):g} s of outage_seconds are left"
                return [one if one.status == "ok" else attrs.evolve(one, error=f"{one.error}{late}") for one in results]
            tries += not held
            self.limits.count("retries")
            pause = min(settings.backoff_seconds * 2.0 ** min(tries - 1, 30), settings.longest_backoff_seconds)
            await clock.sleep(max(pause * self._random.uniform(0.5, 1.0), asked_for))

    async def _attempt(self, requests: Sequence[ScoreRequest], call: _Function, mine: Call) -> Results:
        """Take a turn and call the agent under a deadline, perhaps twice; what goes wrong becomes a status."""
        own = not self.agent.takes_turns
        turn: Any = self.limits.turn(mine) if own else nullcontext(lambda tokens: None)
        async with turn as use:
            mine.holds, is_available = self.limits if own else None, None
            try:
                is_try = await self._breaker.enter()
            except RewardError as error:
                failed = ScoreResult(status="failed", error=str(error), is_unavailable=True, is_final=True)
                return [failed] * len(requests)
            try:
                self._calls += 1
                results = await self._hedged(requests, call, mine)
                is_available = not all(each.is_unavailable for each in results)
            finally:
                self._breaker.leave(is_available, tried=is_try)
            self.ended += 1
            use(sum([each.tokens for each in results]))
            if seconds := sum([each.seconds for each in results]):
                self.limits.count("paid_seconds", seconds)
            return results

    async def _hedged(self, requests: Sequence[ScoreRequest], call: _Function, mine: Call) -> Results:
        """Call the agent, and once more beside a call that takes long; the first scores count."""
        seconds = self.config.hedge_seconds
        if seconds is None:
            return await self._called(requests, call, mine)
        tasks = [asyncio.ensure_future(self._called(requests, call, mine))]
        try:
            with suppress(DeadlineExceeded):
                return await self.context.clock.wait_for(asyncio.shield(tasks[0]), seconds, "the first call")
            if self._hedges >= self.config.hedged * self._calls:
                return await tasks[0]
            self._hedges += 1
            self.limits.count("hedged")
            twin = Call(mine.order, mine.parent, mine.holds)
            tasks.append(asyncio.ensure_future(self._called(requests, call, twin)))
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            first = next(iter(done)).result()
            if others and not all(each.status == "ok" for each in first):
                return await next(iter(others))
            return first
        finally:
            for task in tasks:
                task.cancel()

    async def _called(self, requests: Sequence[ScoreRequest], call: _Function, mine: Call) -> Results:
        """Call the agent once; an error or a passed deadline becomes a status."""
        seconds, token = max([each.deadline_seconds for each in requests]), CALL.set(mine)
        try:
            if self.agent.keeps_deadlines:
                results = await call(requests)
            else:
                who = f"the reward of sample {requests[0].idempotency_key}"
                who += f" and {len(requests) - 1} of its group" if len(requests) > 1 else ""
                results = await self._within(call(requests), seconds, mine, who)
            if len(results) != len(requests):
                expected = f"one result for each of {len(requests)} samples"
                what, code = "a reward has results missing", "reward.output"
                raise RewardError(what, code=code, expected=expected, found=len(results))
            return [checked(result, each.idempotency_key) for result, each in zip(results, requests, strict=True)]
        except DeadlineExceeded as error:
            failed = ScoreResult(status="timeout", error=error.message)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # SystemExit is the reward's, too
            unavailable = isinstance(error, JackfieldError) and error.code in _UNAVAILABLE
            text = str(error) if isinstance(error, JackfieldError) else described(error)
            failed = ScoreResult(status="failed", error=text, is_unavailable=unavailable)
        finally:
            CALL.reset(token)
        return [failed] * len(requests)

    async def _within(self, work: Awaitable[Results], seconds: float, mine: Call, who: str) -> Results:
        """Wait for a call; the time in which it waits for turns does not count."""
        clock = self.context.clock
        if not self.agent.takes_turns:
            return await clock.wait_for(work, seconds, who)
        task, began = asyncio.ensure_future(work), clock.time()
        try:
            while True:
                now = clock.time()
                left = seconds - (now - began) + mine.paused(now)
                if left <= 0.0 and not mine.waiting:
                    raise too_late(seconds, who)
                try:
                    return await clock.wait_for(asyncio.shield(task), max(left, 0.01), who)
                except DeadlineExceeded:
                    if task.done():  # its own error, or its results in the same moment
                        return await task
        finally:
            task.cancel()


def checked(result: ScoreResult, key: str, dimensions: Sequence[str] = ()) -> ScoreResult:
    """Turn a score into a failure if a number is not finite or a dimension is missing."""
    plain = type(result.score) is float and math.isfinite(result.score)
    if result.status != "ok" or (plain and not (result.metrics or result.dimensions or dimensions)):
        return result
    named = {**result.metrics, **result.dimensions} if result.dimensions else result.metrics
    wrong = not_finite({"score": result.score}) or not_finite(named) or list(filter(_is_odd, named))
    missing = [name for name in dimensions if name != "score" and name not in named]
    if not (wrong or missing):
        return result
    message = f"a reward agent returned a {', '.join(map(str, wrong))} that is no finite number"
    expected, found = "a score and metrics that are finite numbers", str(wrong)
    if not wrong:
        message = f"a score has no metric {', '.join(missing)}, which algorithm.reward_dimensions names"
        expected, found = ", ".join(dimensions), ", ".join(named) or "no metrics"
    refusal = RewardError(message, code="reward.output", where=key, expected=expected, found=found)
    return ScoreResult(status="failed", error=str(refusal))


def _is_odd(name: str) -> bool:
    """Return whether a name has half of a surrogate pair, which no file can have."""
    return not name.isascii() and name != name.encode(errors="replace").decode()


_Function: TypeAlias = Callable[[Sequence[ScoreRequest]], Awaitable[Results]]
