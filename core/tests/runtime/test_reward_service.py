"""Tests of the reward service on virtual time: turns, retries, deadlines, breaker, hedging, cache and groups."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.errors import ConfigError, RewardError
from jackfield.runtime.reward_limits import Limits, RewardCache
from jackfield.runtime.reward_service import RewardService
from jackfield_virtual_clock import VirtualClock


@attrs.define(eq=False)
class Log:
    """What a scripted reward was asked, and how many calls ran at once."""

    began: list[tuple[str, int, float]] = attrs.field(factory=list)  #: key, retry and time
    most: int = 0
    running: int = 0


class Scripted(RewardAgent):
    """Runs a script for each call."""

    def __init__(self, clock: VirtualClock, script: Callable[[ScoreRequest], Awaitable[ScoreResult]]) -> None:
        super().__init__(None, RewardContext(clock=clock))
        self.script, self.log = script, Log()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.log.began.append((request.idempotency_key, request.retry, self.context.clock.time()))
        self.log.running += 1
        self.log.most = max(self.log.most, self.log.running)
        try:
            return await self.script(request)
        finally:
            self.log.running -= 1


def asks(key: str, *, deadline: float = 60.0, **fields: Any) -> ScoreRequest:
    text = fields.pop("text", key)
    return ScoreRequest(
        data_source="", solution_str=text, ground_truth="", idempotency_key=key, deadline_seconds=deadline, **fields
    )


def service_of(agent: RewardAgent, **options: Any) -> RewardService:
    options.setdefault("backoff_seconds", 1.0)
    return RewardService(agent, RewardServiceConfig(**options), agent.context.clock)  # type: ignore[arg-type]


def sleeping(clock: VirtualClock, seconds: float) -> Callable[[ScoreRequest], Awaitable[ScoreResult]]:
    async def script(request: ScoreRequest) -> ScoreResult:
        await clock.sleep(seconds)
        return ScoreResult(score=1.0)

    return script


def test_deadlines_count_execution_and_not_queueing() -> None:
    """1,024 samples of 40 s on 16 turns need 2,560 s, and none passes its deadline of 60 s."""
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, 40.0))
    service = service_of(agent, concurrency=16)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(1024))))

    results = clock.run(main())
    assert {"ok"} == {each.status for each in results}
    assert (16, 2560.0) == (agent.log.most, clock.time())


def test_the_agents_own_concurrency_is_a_limit_too() -> None:
    clock = VirtualClock()

    class Few(Scripted):
        concurrency = 3

    agent = Few(clock, sleeping(clock, 1.0))
    service = service_of(agent, concurrency=5)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(9)))

    clock.run(main())
    assert 3 == agent.log.most


def test_the_oldest_batch_comes_first_and_groups_stay_together() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, 1.0))
    service = service_of(agent, concurrency=1)
    places = [(2, "b"), (1, "d"), (2, "a"), (1, "c"), (1, "d"), (2, "a")]

    async def main() -> None:
        first = asyncio.ensure_future(service.compute_score(asks("first")))
        await clock.sleep(0.5)
        more = (asks(f"{batch}{group}", priority=batch, group_id=group) for batch, group in places)
        await asyncio.gather(first, *map(service.compute_score, more))

    clock.run(main())
    assert ["first", "1c", "1d", "1d", "2a", "2a", "2b"] == [key for key, *_ in agent.log.began]


@given(rate=st.floats(0.5, 50.0), count=st.integers(1, 60), seconds=st.floats(0.0, 5.0))
@settings(max_examples=40, deadline=None)
def test_no_second_has_more_requests_than_the_limit(rate: float, count: int, seconds: float) -> None:
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, seconds))
    service = service_of(agent, requests_per_second=rate)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(count)))

    clock.run(main())
    times = [time for *_, time in agent.log.began]
    for start in times:
        assert sum(start <= time < start + 1.0 for time in times) <= 1.05 * rate + 1
    assert times[-1] <= (count - 1) / rate + 1e-6, "no turn is wasted"


def test_no_minute_has_more_tokens_than_the_limit() -> None:
    clock = VirtualClock()

    async def script(request: ScoreRequest) -> ScoreResult:
        await clock.sleep(2.0)
        return ScoreResult(score=1.0, tokens=100)

    agent = Scripted(clock, script)
    service = service_of(agent, tokens_per_minute=6000, concurrency=4)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(300)))

    clock.run(main())
    times = [time for *_, time in agent.log.began]
    for start in times:
        assert 100 * sum(start <= time < start + 60.0 for time in times) <= 6000 + 400
    assert clock.time() <= 1.1 * 300 * 100 / 6000 * 60, "most of the limit is used"


def test_a_call_that_is_given_up_gives_its_turn_to_the_next() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, 10.0))
    service = service_of(agent, concurrency=1)

    async def main() -> None:
        tasks = [asyncio.ensure_future(service.compute_score(asks(str(n)))) for n in range(4)]
        await clock.sleep(1.0)
        tasks[0].cancel()
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    clock.run(main())
    assert ["0", "2", "3"] == [key for key, *_ in agent.log.began]
    assert 21.0 == clock.time()


def failing(times: int, **fields: Any) -> Callable[[ScoreRequest], Coroutine[Any, Any, ScoreResult]]:
    """Fail the first tries of each sample."""

    async def script(request: ScoreRequest) -> ScoreResult:
        if request.retry < times:
            return ScoreResult(status="failed", error="not now", **fields)
        return ScoreResult(score=2.0)

    return script


def test_a_retry_waits_longer_each_time_under_the_same_key() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, failing(4))
    service = service_of(agent, retries=4, longest_backoff_seconds=3.0)
    result = clock.run(service.compute_score(asks("a")))
    assert 2.0 == result.score
    assert [("a", retry) for retry in range(5)] == [(key, retry) for key, retry, _ in agent.log.began]
    times = [time for *_, time in agent.log.began]
    pauses = [later - time for time, later in itertools.pairwise(times)]
    for pause, bound in zip(pauses, (1.0, 2.0, 3.0, 3.0), strict=True):
        assert bound / 2 <= pause <= bound
    assert {"retries": 4.0} == service.limits.taken()


def test_a_service_that_asks_for_time_gets_it() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, failing(1, retry_after=17.0))
    clock.run(service_of(agent).compute_score(asks("a")))
    assert [0.0, 17.0] == [time for *_, time in agent.log.began]


def test_a_service_that_asks_for_more_than_the_outage_may_last_fails_its_samples() -> None:
    """Otherwise a run would wait until the deadline of its batch, and name neither the service nor its answer."""
    clock = VirtualClock()
    agent = Scripted(clock, failing(10**9, retry_after=1e13, is_unavailable=True))
    result = clock.run(service_of(agent, retries=9, outage_seconds=50.0).compute_score(asks("a")))
    assert ("failed", 1) == (result.status, len(agent.log.began))
    assert "asks for 1e+13 s" in str(result.error)


def test_the_policy_retry_does_not_count_the_wait_for_the_first_turn() -> None:
    clock = VirtualClock()

    async def script(request: ScoreRequest) -> ScoreResult:
        await clock.sleep(10.0)
        if request.idempotency_key == "last" and request.retry == 0:
            return ScoreResult(status="failed", error="once")
        return ScoreResult(score=1.0)

    service = service_of(Scripted(clock, script), concurrency=1, retries=0, on_failure="retry", outage_seconds=30.0)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(key)) for key in [*"abcdefgh", "last"])))

    assert {"ok"} == {each.status for each in clock.run(main())}


def test_a_breaker_may_be_turned_off_and_what_has_no_effect_is_refused() -> None:
    clock = VirtualClock()
    agent = Down(clock, 1e9)
    service = service_of(agent, retries=0, breaker_failures=None)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(50)))

    clock.run(main())
    assert 50 == len(agent.log.began)
    with pytest.raises(ConfigError) as caught:
        RewardServiceConfig(hedged=0.2)
    assert "reward_service.hedged" == caught.value.where


def test_a_metric_whose_name_no_file_can_have_fails_its_sample() -> None:
    clock = VirtualClock()

    async def script(request: ScoreRequest) -> ScoreResult:
        return ScoreResult(score=1.0, metrics={"half \ud800": 1.0})

    assert "failed" == clock.run(service_of(Scripted(clock, script), retries=0).compute_score(asks("a"))).status


def test_a_failure_that_is_final_is_not_tried_again() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, failing(9, is_final=True))
    result = clock.run(service_of(agent, retries=5).compute_score(asks("a")))
    assert ("failed", 1) == (result.status, len(agent.log.began))


def test_the_policy_retry_goes_on_through_an_outage() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, failing(12))
    result = clock.run(service_of(agent, retries=0, on_failure="retry", outage_seconds=500.0).compute_score(asks("a")))
    assert 2.0 == result.score
    never = Scripted(clock, failing(10**9))
    late = service_of(never, on_failure="retry", outage_seconds=500.0, longest_backoff_seconds=10.0)
    began = clock.time()
    assert "failed" == clock.run(late.compute_score(asks("b"))).status
    assert 500.0 <= clock.time() - began <= 520.0


@pytest.mark.parametrize(
    "raised",
    [ValueError("bad"), SystemExit(3), KeyboardInterrupt(), RewardError("no"), RecursionError("deep")],
    ids=repr,
)
def test_whatever_a_reward_raises_is_a_status(raised: BaseException) -> None:
    clock = VirtualClock()

    async def script(request: ScoreRequest) -> ScoreResult:
        raise raised

    result = clock.run(service_of(Scripted(clock, script), retries=0).compute_score(asks("a")))
    assert ("failed", None) == (result.status, result.score)
    assert result.error


@pytest.mark.parametrize("score", [float("nan"), float("inf"), None, "1"])
def test_a_score_that_is_no_number_is_a_failure(score: Any) -> None:
    clock = VirtualClock()

    async def script(request: ScoreRequest) -> ScoreResult:
        return ScoreResult(score=score, dimensions={"a": 1.0})

    result = clock.run(service_of(Scripted(clock, script), retries=0).compute_score(asks("a")))
    assert "failed" == result.status
    assert "reward.output" in str(result.error)


def test_a_late_call_is_cancelled_and_named() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, 100.0))
    result = clock.run(service_of(agent, retries=1, backoff_seconds=0.0).compute_score(asks("a", deadline=5.0)))
    assert ("timeout", 0, 2) == (result.status, agent.log.running, len(agent.log.began))
    assert "sample a" in str(result.error)
    assert 10.0 == clock.time()


class Asking(Scripted):
    """Takes two turns for each score, one after the other."""

    takes_turns = True

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        for _ in range(2):
            async with self.context.turn() as used:
                await super().compute_score(request)
                used(10)
        return ScoreResult(score=1.0)


def test_the_deadline_stands_still_while_a_call_waits_for_its_own_turns() -> None:
    clock = VirtualClock()
    limits = Limits(RewardServiceConfig(concurrency=2), clock)
    agent = Asking(clock, sleeping(clock, 4.0))
    agent.context = RewardContext(clock=clock, turn=limits.turn)
    service = RewardService(agent, limits.settings, clock, limits=limits)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(str(n), deadline=9.0)) for n in range(8))))

    assert {"ok"} == {each.status for each in clock.run(main())}
    assert (2, 32.0) == (agent.log.most, clock.time())
    assert 160.0 == service.limits.taken()["tokens"]
    late = RewardService(agent, limits.settings, clock, limits=limits)
    assert "timeout" == clock.run(late.compute_score(asks("late", deadline=7.0))).status


def test_a_turn_inside_of_a_turn_is_the_same_one() -> None:
    """A mix whose parts take turns would wait for itself."""
    clock = VirtualClock()
    limits = Limits(RewardServiceConfig(concurrency=1), clock)
    inner = Asking(clock, sleeping(clock, 1.0))
    inner.context = RewardContext(clock=clock, turn=limits.turn)
    outer = Scripted(clock, inner.compute_score)
    service = RewardService(outer, limits.settings, clock, limits=limits)
    assert "ok" == clock.run(service.compute_score(asks("a"))).status


class Down(Scripted):
    """A service that does not answer until a time."""

    def __init__(self, clock: VirtualClock, until: float) -> None:
        async def script(request: ScoreRequest) -> ScoreResult:
            await clock.sleep(0.1)
            if clock.time() < until:
                raise RewardError("connection refused", code="reward.http")
            return ScoreResult(score=1.0)

        super().__init__(clock, script)


def test_an_outage_costs_few_calls_and_no_further_sample() -> None:
    """16 failures open the breaker; then one call at a time tries, and the others wait without using up their tries."""
    clock = VirtualClock()
    agent = Down(clock, 200.0)
    service = service_of(agent, retries=1, concurrency=4)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(400))))

    results = clock.run(main())
    failed = sum(each.status != "ok" for each in results)
    assert failed <= 12, "those that had used up their tries before the breaker opened"
    during = sum(time < 200.0 for *_, time in agent.log.began)
    assert during <= 32
    assert clock.time() < 260.0, "they go on soon after it answers"


def test_a_breaker_that_stays_open_ends_the_wait() -> None:
    clock = VirtualClock()
    service = service_of(Down(clock, 1e9), retries=1, outage_seconds=100.0)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(50))))

    results = clock.run(main())
    assert {"failed"} == {each.status for each in results}
    assert any("reward.unavailable" in str(each.error) for each in results)
    assert 100.0 <= clock.time() <= 220.0


def test_a_failure_of_a_sample_opens_no_breaker() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, failing(10**9))
    service = service_of(agent, retries=0)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(100)))

    clock.run(main())
    assert (100, 0.0) == (len(agent.log.began), clock.time())


def test_a_try_that_is_given_up_lets_another_one_try() -> None:
    clock = VirtualClock()
    agent = Down(clock, 20.0)
    service = service_of(agent, retries=1, breaker_failures=1, breaker_seconds=5.0)

    async def main() -> None:
        first = asyncio.ensure_future(service.compute_score(asks("first")))
        await clock.sleep(2.0)
        others = [asyncio.ensure_future(service.compute_score(asks(str(n)))) for n in range(3)]
        await clock.sleep(1.0)
        first.cancel()
        assert {"ok"} == {each.status for each in await asyncio.gather(*others)}

    clock.run(main())


def test_a_straggler_gets_a_second_call_and_the_first_score_counts() -> None:
    clock, slow = VirtualClock(), {"5"}

    async def script(request: ScoreRequest) -> ScoreResult:
        is_slow = request.solution_str in slow
        slow.discard(request.solution_str)
        await clock.sleep(50.0 if is_slow else 1.0)
        return ScoreResult(score=50.0 if is_slow else 1.0)

    agent = Scripted(clock, script)
    service = service_of(agent, hedge_seconds=3.0)

    async def main() -> list[ScoreResult]:
        return list(await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(40))))

    results = clock.run(main())
    assert {1.0} == {each.score for each in results}
    assert (4.0, 41, 0) == (clock.time(), len(agent.log.began), agent.log.running)
    assert ["5", "5"] == [key for key, *_ in agent.log.began if key == "5"]


def test_second_calls_are_bounded() -> None:
    clock = VirtualClock()
    agent = Scripted(clock, sleeping(clock, 10.0))
    service = service_of(agent, hedge_seconds=1.0, hedged=0.1)

    async def main() -> None:
        await asyncio.gather(*(service.compute_score(asks(str(n))) for n in range(100)))

    clock.run(main())
    assert 110 == len(agent.log.began)


class Versioned(Scripted):
    version = "1"


def cached(agent: RewardAgent, folder: Path, identity: str = "me") -> RewardService:
    config = RewardServiceConfig(cache=str(folder), backoff_seconds=0.0)
    return RewardService(agent, config, agent.context.clock, identity=identity, cache=RewardCache(folder))


def test_scores_are_known_across_services_until_the_version_changes(tmp_path: Path) -> None:
    clock = VirtualClock()
    result = ScoreResult(score=1.5, metrics={"m": 1.0}, dimensions={"d": 2.0}, explanation="why", raw="{}", tokens=7)

    async def script(request: ScoreRequest) -> ScoreResult:
        return result

    def asked(*arguments: Any, **fields: Any) -> tuple[bool, ScoreResult]:
        agent_calls = Versioned(clock, script)
        agent_calls.version = arguments[0]  # type: ignore[misc]
        service = cached(agent_calls, tmp_path, *arguments[2:])

        async def main() -> ScoreResult:
            try:
                return await service.compute_score(asks("key", text=arguments[1], **fields))
            finally:
                await service.close()

        found = clock.run(main())
        return bool(agent_calls.log.began), found

    assert (True, result) == asked("1", "text")
    assert (False, attrs.evolve(result, is_cached=True)) == asked("1", "text", priority=7, group_id="other")
    assert asked("2", "text")[0], "another version"
    assert asked("1", "text", "other settings")[0]
    assert asked("1", "another text")[0]
    assert asked("1", "text", extra_info={"x": 1})[0]


def test_failures_and_unversioned_scores_are_not_kept(tmp_path: Path) -> None:
    clock = VirtualClock()
    for agent in (Versioned(clock, failing(10**9)), Scripted(clock, sleeping(clock, 1.0))):
        service = cached(agent, tmp_path)

        async def main(service: RewardService = service) -> None:
            for _ in range(2):
                await service.compute_score(asks("same"))
            await service.close()

        clock.run(main())
        assert len(agent.log.began) >= 2


def test_equal_answers_in_flight_are_scored_once(tmp_path: Path) -> None:
    clock = VirtualClock()
    agent = Versioned(clock, sleeping(clock, 5.0))
    service = cached(agent, tmp_path)

    async def main() -> list[ScoreResult]:
        tasks = [asyncio.ensure_future(service.compute_score(asks(str(n), text="same"))) for n in range(8)]
        await clock.sleep(1.0)
        tasks[0].cancel()  # the others do not fail with it
        results = await asyncio.gather(*tasks, return_exceptions=True)
        await service.close()
        return [each for each in results if isinstance(each, ScoreResult)]

    results = clock.run(main())
    assert [1.0] * 7 == [each.score for each in results]
    assert 2 == len(agent.log.began)


def test_a_cache_that_breaks_meanwhile_costs_no_score(tmp_path: Path) -> None:
    clock = VirtualClock()
    agent = Versioned(clock, sleeping(clock, 1.0))
    service = cached(agent, tmp_path)

    async def main() -> list[ScoreResult]:
        first = await service.compute_score(asks("same"))
        with sqlite3.connect(tmp_path / "scores.sqlite") as other:
            other.execute("DROP TABLE scores")
        second = await service.compute_score(asks("same"))
        await service.close()
        return [first, second]

    assert [1.0, 1.0] == [each.score for each in clock.run(main())]
    assert 2 == len(agent.log.began)


def test_a_cache_that_cannot_be_opened_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "scores.sqlite").write_bytes(b"no database, but more bytes than a header has " * 40)
    with pytest.raises(RewardError) as caught:
        RewardCache(tmp_path)
    assert "reward.cache" == caught.value.code


class Ranking(RewardAgent):
    """Scores a sample by its rank in its group."""

    def __init__(self, clock: VirtualClock, *, short: bool = False) -> None:
        super().__init__(None, RewardContext(clock=clock))
        self.short = short

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        raise NotImplementedError

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        order = sorted(each.solution_str for each in requests)
        return [ScoreResult(score=float(order.index(each.solution_str))) for each in requests[self.short :]]


def test_a_group_is_scored_whole_by_an_agent_that_compares() -> None:
    clock = VirtualClock()
    service = service_of(Ranking(clock))
    assert service.compares
    assert not service_of(Scripted(clock, sleeping(clock, 1.0))).compares
    results = clock.run(service.score_group([asks("b"), asks("c"), asks("a")]))
    assert [1.0, 2.0, 0.0] == [each.score for each in results]
    short = clock.run(service_of(Ranking(clock, short=True), retries=0).score_group([asks("b"), asks("c")]))
    assert ["failed", "failed"] == [each.status for each in short]
    assert "reward.output" in str(short[0].error)
