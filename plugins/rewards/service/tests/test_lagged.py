"""Rewards that arrive later: from other processes, over HTTP, before and after a restart."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, RewardError
from jackfield.plugins import load_plugin
from jackfield_reward_service import Pushed, Reward, pending, push, push_all
from jackfield_testing import in_loop


@asynccontextmanager
async def waiting(place: Path, context: Mapping[str, Any] | None = None, **settings: Any) -> AsyncIterator[RewardAgent]:
    """Start the reward as a run does."""
    options = {"folder": str(place), "poll_seconds": 0.01, **settings}
    agent: RewardAgent = load_plugin("reward", "lagged").build(options, RewardContext(run="a run", **(context or {})))
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


def request(sample: str, text: str = "four") -> ScoreRequest:
    return ScoreRequest(
        data_source="sums", solution_str=text, ground_truth="4", prompt_str="2+2?", idempotency_key=sample
    )


def scoring(agent: RewardAgent, *samples: str, text: str = "four") -> list[asyncio.Task[ScoreResult]]:
    return [asyncio.ensure_future(agent.compute_score(request(sample, text))) for sample in samples]


async def registered(folder: Path, count: int) -> list[str]:
    """Return the keys of the samples that wait, when there are so many."""
    async with asyncio.timeout(30):
        while len(found := pending(folder, limit=100_000)) < count:
            await asyncio.sleep(0)
    return [each.key for each in found]


@in_loop
async def test_a_reward_from_another_process_ends_the_wait_of_its_sample_alone(tmp_path: Path) -> None:
    """Thousands may wait; the others still do."""
    async with waiting(tmp_path) as agent:
        tasks = scoring(agent, *(f"train/{number}" for number in range(2000)))
        keys = await registered(tmp_path, 2000)
        code = "import sys; from jackfield_reward_service import push; push(sys.argv[1], sys.argv[2], 0.5)"
        subprocess.run([sys.executable, "-c", code, str(tmp_path), keys[1234]], check=True, timeout=30)
        assert (await tasks[1234]).score == 0.5
        assert [number for number, task in enumerate(tasks) if task.done()] == [1234]
        assert len(pending(tmp_path, limit=100_000)) == 1999
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@in_loop
async def test_a_reward_may_come_while_no_run_is_at_work(tmp_path: Path) -> None:
    """A restart finds it, as often as the sample is scored; explanation and dimensions come along."""
    async with waiting(tmp_path) as agent:
        (task,) = scoring(agent, "train/1")
        (key,) = await registered(tmp_path, 1)
        task.cancel()
    (sample,) = pending(tmp_path)
    assert (sample.sample, sample.run, sample.data_source, sample.prompt) == ("train/1", "a run", "sums", "2+2?")
    assert (sample.response, sample.ground_truth) == ("four", "4")
    assert push(tmp_path, key, 0.25, explanation="a word", dimensions={"taste": 1.0}) == Pushed(new=1, known=0)
    for _ in range(2):
        async with waiting(tmp_path) as agent:
            expected = ScoreResult(score=0.25, explanation="a word", dimensions={"taste": 1.0})
            assert await agent.compute_score(request("train/1")) == expected
    assert pending(tmp_path) == []


@in_loop
async def test_a_reward_of_an_older_text_is_not_used(tmp_path: Path) -> None:
    """A sample that is generated again with another text waits for a reward of its own."""
    async with waiting(tmp_path) as agent:
        (old,) = scoring(agent, "train/1", text="four")
        (key,) = await registered(tmp_path, 1)
        (new,) = scoring(agent, "train/1", text="five")
        other = (await registered(tmp_path, 2))[1]
        push(tmp_path, key, 1.0)
        assert (await old).score == 1.0
        assert not new.done()
        push(tmp_path, other, 0.0)
        assert (await new).score == 0.0


@in_loop
async def test_the_same_reward_twice_is_one_and_another_is_refused(tmp_path: Path) -> None:
    """All rewards of one push are taken or none; the errors name what waits."""
    async with waiting(tmp_path) as agent:
        tasks = scoring(agent, "train/1", "train/2")
        one, two = await registered(tmp_path, 2)
        rewards = [Reward(key=one, score=1.0), Reward(key=two, score=0.5)]
        for wrong, code in (
            (Reward(key="train/3@0000", score=1.0), "reward.unknown-sample"),
            (Reward(key=one, score=0.0), "reward.conflict"),
        ):
            with pytest.raises(RewardError) as refused:
                push_all(tmp_path, [*rewards, wrong])
            assert (refused.value.code, refused.value.where) == (code, wrong.key)
        with pytest.raises(RewardError) as refused:
            push(tmp_path, "train/1", 1.0)
        assert one in str(refused.value.found)
        assert not any(task.done() for task in tasks)
        assert push_all(tmp_path, rewards) == Pushed(new=2, known=0)
        assert [(await task).score for task in tasks] == [1.0, 0.5]
        assert push_all(tmp_path, rewards) == Pushed(new=0, known=2)


@in_loop
async def test_a_sample_waits_no_longer_than_it_is_told(tmp_path: Path) -> None:
    """The time counts over restarts, the result names the sample, and a late reward is refused."""
    async with waiting(tmp_path) as agent:
        (task,) = scoring(agent, "train/1")
        (key,) = await registered(tmp_path, 1)
        task.cancel()
    with sqlite3.connect(tmp_path / "rewards.sqlite") as database:
        database.execute("UPDATE pending SET since = since - 1000")
    database.close()
    async with waiting(tmp_path, wait_seconds=999.0) as agent:
        result = await agent.compute_score(request("train/1"))
        assert (result.status, result.score, result.is_final) == ("timeout", None, True)
        assert key in str(result.error)
        assert "wait_seconds" in str(result.error)
        with pytest.raises(RewardError) as refused:
            push(tmp_path, key, 1.0)
        assert refused.value.code == "reward.unknown-sample"
        (task,) = scoring(agent, "train/1")  # asked for again, it waits anew
        await registered(tmp_path, 1)
        push(tmp_path, key, 1.0)
        assert (await task).score == 1.0


@in_loop
async def test_rewards_arrive_over_http(tmp_path: Path) -> None:
    """With the token of a file that only this user can read; Python uses the same address."""
    async with waiting(tmp_path, port=0, poll_seconds=1000.0) as agent:
        tasks = scoring(agent, "train/1", "train/2")
        one, two = await registered(tmp_path, 2)
        url, token = ((tmp_path / name).read_text().strip() for name in ("url", "token"))
        assert (tmp_path / "token").stat().st_mode & 0o077 == 0
        assert [each.key for each in await asyncio.to_thread(pending, url, token=token)] == [one, two]
        assert [each.key for each in await asyncio.to_thread(pending, url, token=token, limit=1)] == [one]
        assert await asyncio.to_thread(push, url, one, 1.0, token=token) == Pushed(new=1, known=0)
        assert (await tasks[0]).score == 1.0  # at once: nothing looks for another 1,000 s
        await asyncio.to_thread(push, url, two, 0.5, explanation="half", token=token)
        assert (await tasks[1]).explanation == "half"


@in_loop
async def test_requests_that_are_refused_say_why(tmp_path: Path) -> None:
    """Each error is an object with a code, and nothing is taken."""
    async with waiting(tmp_path, port=0) as agent, aiohttp.ClientSession() as session:
        (task,) = scoring(agent, "train/1")
        (key,) = await registered(tmp_path, 1)
        url, token = ((tmp_path / name).read_text().strip() for name in ("url", "token"))
        headers = {"Authorization": f"Bearer {token}"}
        push(tmp_path, key, 1.0)
        await task

        async def refused(path: str = "/rewards", body: Any = None, **options: Any) -> tuple[int, str]:
            made = {"headers": headers, **options}
            method = "POST" if body is not None else "GET"
            async with session.request(method, f"{url}{path}", data=body, **made) as answer:
                return answer.status, (await answer.json())["error"]["code"]

        found = {"key": key, "score": 0.0}
        assert await refused(body=json.dumps(found), headers={}) == (401, "reward.token")
        assert await refused("/pending", headers={"Authorization": f"Bearer {token}x"}) == (401, "reward.token")
        assert await refused("/elsewhere", headers={}) == (401, "reward.token")
        assert await refused(body=json.dumps(found)) == (409, "reward.conflict")
        assert await refused(body=json.dumps({**found, "key": "train/9"})) == (404, "reward.unknown-sample")
        huge, torn = json.dumps({**found, "score": 10**400}), json.dumps({**found, "key": "\ud800"})
        scores = ['{"key": "a"}', '{"key": "a", "score": NaN}', '{"key": "a", "score": true}']
        for wrong in ("{", "1", *scores, huge, torn):
            assert await refused(body=wrong) == (400, "reward.pushed")
        assert await refused(body=json.dumps({**found, "scores": 1})) == (400, "reward.pushed")
        assert await refused(body="[" * 100_000) == (400, "reward.pushed")
        assert await refused("/pending?limit=all") == (400, "reward.pushed")
        assert await refused("/elsewhere") == (404, "reward.pushed")
        assert await refused(body=io.BytesIO(b"x" * (17 * 2**20))) == (413, "reward.pushed")
        with pytest.raises(RewardError) as wrong_token:
            await asyncio.to_thread(push, url, key, 1.0, token="another")
        assert wrong_token.value.code == "reward.token"
        second = waiting(tmp_path, port=int(url.rpartition(":")[2]))
        with pytest.raises(ConfigError) as taken:
            await second.__aenter__()
        assert (taken.value.code, taken.value.where) == ("config.invalid-value", "reward.port")


@in_loop
async def test_the_default_folder_is_in_the_cache(tmp_path: Path) -> None:
    async with waiting(tmp_path, {"cache": tmp_path / "cache"}, folder=None):
        assert (tmp_path / "cache" / "lagged" / "rewards.sqlite").is_file()
    with pytest.raises(ConfigError) as refused:
        await waiting(tmp_path, folder=None).__aenter__()
    assert (refused.value.code, refused.value.where) == ("config.invalid-value", "reward.folder")
