"""What a run gets through the service: comparisons, adjustments of groups, versions, shared scores."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.config.reward_service import RewardServiceConfig
from jackfield.runtime.reward_service import RewardService
from jackfield.sdk.rpc import Contract, Server, Service
from jackfield_rewards.remembered import Remembered
from jackfield_rewards.serving import _SCORING, Front
from jackfield_rewards.turns import FairTurns
from jackfield_testing import in_loop

from .conftest import connected


class Ranking(RewardAgent):
    """Ranks the responses of a group by their length; alone, each is scored by its length."""

    def __init__(self, version: str = "7") -> None:
        super().__init__(None, RewardContext())
        self.groups, self.asked, self.own_version = list[list[str]](), list[str](), version

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        self.groups.append([each.solution_str for each in requests])
        order = sorted(requests, key=lambda each: len(each.solution_str))
        return [ScoreResult(score=float(order.index(each)), explanation="by length") for each in requests]

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.asked.append(request.solution_str)
        return ScoreResult(score=float(len(request.solution_str)))

    @property
    def version(self) -> str:
        return self.own_version


class Adjusting(RewardAgent):
    """Subtracts the mean of a group, and counts calls; a call waits for :attr:`free`."""

    def __init__(self) -> None:
        super().__init__(None, RewardContext())
        self.asked, self.free = list[tuple[str, int]](), asyncio.Event()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        self.asked.append((request.idempotency_key, request.retry))
        await self.free.wait()
        return ScoreResult(score=float(len(request.solution_str)), token_scores=(0.5,), metrics={"n": 1.0})

    def post_process_scores(self, scores: Sequence[ScoreResult]) -> Sequence[ScoreResult]:
        mean = sum(each.score or 0.0 for each in scores) / len(scores)
        return [attrs.evolve(each, score=(each.score or 0.0) - mean) for each in scores]


@asynccontextmanager
async def served(folder: Path, agent: RewardAgent, **settings: Any) -> AsyncIterator[Path]:
    """Serve an agent of this process as ``held``; yield the file with the address."""
    async with AsyncExitStack() as stack:
        clock, remembered = Clock(), Remembered(folder / "remembered.sqlite", 60.0)
        stack.callback(remembered.close)
        service = RewardService(agent, RewardServiceConfig(**settings), clock)
        front = Front("held", service, clock, FairTurns(2), remembered, orphan_seconds=60.0)
        stack.push_async_callback(front.close)
        about = Contract(Front, ["describe"])
        services = {"reward held": Service(target=front, contract=_SCORING)}
        server = Server("a service", {**services, "about held": Service(target=front, contract=about)}, clock, 30.0)
        stack.push_async_callback(server.close)
        (await server.listen()).write(folder / "address.json")
        yield folder / "address.json"


def group(*texts: str) -> list[ScoreRequest]:
    shared: Any = {"data_source": "d", "ground_truth": "", "group_id": "g", "group_size": len(texts)}
    return [ScoreRequest(solution_str=text, idempotency_key=f"g/{n}", **shared) for n, text in enumerate(texts)]


@in_loop
async def test_a_served_comparison_is_asked_for_whole_groups_once(tmp_path: Path) -> None:
    """The run knows that it compares, and its version; a group that is asked for again is not paid again."""
    agent = Ranking()
    async with served(tmp_path, agent) as address, connected(address) as run:
        assert (run.compares, run.version) == (True, "7")
        asked = group("xxx", "x", "xx")
        first = list(await run.score_group(asked))
        assert [(each.score, each.explanation) for each in first] == [
            (2.0, "by length"),
            (0.0, "by length"),
            (1.0, "by length"),
        ]
        assert list(await run.score_group(asked)) == first
        await run.score_group(group("x", "xxx"))
    assert agent.groups == [["xxx", "x", "xx"], ["x", "xxx"]]


@in_loop
async def test_another_version_of_a_reward_does_not_answer_with_the_scores_of_the_first(tmp_path: Path) -> None:
    """The service was started again with other code, within ``remember_seconds``."""
    agents = [Ranking("7"), Ranking("8"), Ranking("8")]
    for agent in agents:
        async with served(tmp_path, agent) as address, connected(address, run="a") as run:
            await run.score_group(group("x", "xxx"))
    assert [len(agent.groups) for agent in agents] == [1, 1, 0]


@in_loop
async def test_a_served_reward_adjusts_groups(tmp_path: Path) -> None:
    """Scores come with all that they have; another reward's groups need no call."""
    agent = Adjusting()
    agent.free.set()
    async with served(tmp_path, agent) as address, connected(address) as run:
        assert (run.compares, run.version) == (False, None)
        asked = group("x", "xxx")
        scores = [await run.compute_score(each) for each in asked]
        assert scores[0] == ScoreResult(score=1.0, token_scores=(0.5,), metrics={"n": 1.0})
        assert [each.score for each in await run.finish_group(asked, scores)] == [-1.0, 1.0]


@in_loop
async def test_two_runs_have_scores_of_their_own_and_two_requests_of_one_run_share_a_call(tmp_path: Path) -> None:
    """A second connection of a run that asks for the same sample waits for the first call, whatever its retry is."""
    agent = Adjusting()
    async with served(tmp_path, agent) as address, AsyncExitStack() as stack:
        runs = [await stack.enter_async_context(connected(address, run=name)) for name in ("a", "a", "b")]
        (request,) = group("x")
        tasks = [
            asyncio.ensure_future(run.compute_score(attrs.evolve(request, retry=retry)))
            for run, retry in zip(runs, (0, 1, 0), strict=True)
        ]
        while len(agent.asked) < 2:
            await asyncio.sleep(0)
        about = await served_counts(runs[0])
        agent.free.set()
        assert [each.score for each in await asyncio.gather(*tasks)] == [1.0, 1.0, 1.0]
        assert about["in_progress"] == 2
    assert agent.asked == [("g/0", 0), ("g/0", 0)]


@in_loop
async def test_a_run_with_one_sample_does_not_wait_for_all_of_another_run(tmp_path: Path) -> None:
    """Although its batch has a higher number."""
    agent = Adjusting()
    async with served(tmp_path, agent, concurrency=1) as address, AsyncExitStack() as stack:
        many, one = [await stack.enter_async_context(connected(address, run=name)) for name in ("many", "one")]
        asked = [attrs.evolve(each, priority=1) for each in group(*"abcdefgh")]
        late = attrs.evolve(asked[0], idempotency_key="late", priority=700)
        tasks = [asyncio.ensure_future(many.compute_score(each)) for each in asked]
        while sum((await served_counts(many))["waiting"].values()) < 6:
            await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(one.compute_score(late)))
        while "one" not in (await served_counts(many))["waiting"]:
            await asyncio.sleep(0)
        agent.free.set()
        await asyncio.gather(*tasks)
    assert [key for key, _ in agent.asked].index("late") <= 3  # two had begun, and one comes between


async def served_counts(run: Any) -> dict[str, Any]:
    """Return what the service says of its work."""
    from jackfield.sdk.rpc import stub
    from jackfield_reward_service.service import _DESCRIBED, Described

    return await stub(run._connection, "about held", _DESCRIBED, Described, 10.0).describe()
