"""Answers are kept as samples with users' rewards, and keeping them changes no answer."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import openai
import pytest

from jackfield.queue.sample_files import read_samples
from jackfield_openai.collecting import Collector, collected, main

from .conftest import ANSWER, Serve

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "one two"}]}


def asyncio_test(function: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run an asynchronous test."""

    @functools.wraps(function)
    def run(*args: Any, **fixtures: Any) -> None:
        asyncio.run(function(*args, **fixtures))

    return run


async def feedback(client: openai.AsyncOpenAI, **body: Any) -> Any:
    return await client.post("/feedback", body=body, cast_to=object)


@asyncio_test
async def test_answers_become_samples_that_a_run_reads(serve: Serve, tmp_path: Path) -> None:
    """Whole and streamed ones, in groups by prompt, with the last reward that a user gave."""
    async with serve(collect=str(tmp_path / "day")) as (client, _):
        both = await client.chat.completions.create(**ASKED, n=2)
        streamed = await client.chat.completions.create(**ASKED, stream=True)
        ids = {chunk.id async for chunk in streamed}
        plain = await client.completions.create(model="tiny", prompt=["one", "two"], max_tokens=2)
        for index, reward in ((0, 1), (1, 0.5), (1, 0.25)):
            await feedback(client, id=both.id, index=index, reward=reward)
    samples = {each["key"]: each for each in collected(tmp_path / "day")}
    assert {f"{both.id}/0", f"{both.id}/1", f"{ids.pop()}/0", f"{plain.id}/0", f"{plain.id}/1"} == samples.keys()
    assert [1.0, 0.25] == [samples[f"{both.id}/{index}"]["columns"]["reward"] for index in (0, 1)]
    assert {f"{both.id}/0"} == {samples[f"{both.id}/{index}"]["group"] for index in (0, 1)}
    assert 2 == len({samples[f"{plain.id}/{index}"]["group"] for index in (0, 1)})
    one = samples[f"{both.id}/0"]["columns"]
    assert [[1, 3, 4, 2], list(ANSWER), [-0.5, -1.0, -1.5]] == [
        one[name] for name in ("prompt_ids", "response_ids", "rollout_log_probs")
    ]
    assert ASKED["messages"] == one["task"]["extra_info"]["messages"]
    assert (0, 2) == tuple(samples[f"{both.id}/0"]["tags"][f"weight_version_{bound}"] for bound in ("min", "max"))
    scored = list(collected(tmp_path / "day", scored_only=True))
    assert {f"{both.id}/0", f"{both.id}/1"} == {each["key"] for each in scored}
    file = tmp_path / "night.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in samples.values()))
    assert list(samples) == [sample.key for sample in read_samples(file)]


@asyncio_test
async def test_an_answer_that_failed_is_not_kept(serve: Serve, tmp_path: Path) -> None:
    async with serve(collect=str(tmp_path)) as (client, script):
        script.failure, script.fails_after = RuntimeError("lost"), 1
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(**ASKED)
    assert [] == list(collected(tmp_path))


@asyncio_test
async def test_feedback_is_checked(serve: Serve, tmp_path: Path) -> None:
    async with serve(collect=str(tmp_path)) as (client, _):
        for wrong in ({"id": "x"}, {"id": "x", "reward": "good"}, {"id": "x", "reward": 1, "rewrad": 2}):
            with pytest.raises(openai.BadRequestError):
                await feedback(client, **wrong)
    async with serve() as (client, _):
        with pytest.raises(openai.NotFoundError):
            await feedback(client, id="x", reward=1)


@asyncio_test
async def test_a_disk_that_fails_or_is_slow_changes_no_answer(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What cannot be written is counted and logged once; every answer is the same."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Collector, "_append", full)
    async with serve(collect=str(tmp_path), collect_lines=1) as (client, _):
        for _ in range(3):
            answer = await client.chat.completions.create(**ASKED, n=4)
            assert ["one two three"] * 4 == [choice.message.content for choice in answer.choices]
        metrics = await client.get("../metrics", cast_to=str)
    assert 1 == sum("No space left" in record.message for record in caplog.records)
    dropped = next(line for line in metrics.splitlines() if 'state="dropped"' in line)
    assert float(dropped.split()[-1]) >= 9


@asyncio_test
async def test_a_folder_that_cannot_be_made_is_refused_at_the_start(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Exception, match="answers cannot be kept") as refused:
        async with serve(collect=str(tmp_path / "file" / "below")):
            pass
    assert "openai.collect" == refused.value.where  # type: ignore[attr-defined]


def test_rewards_without_an_answer_and_folders_without_answers_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "day", tmp_path / "night.jsonl"
    monkeypatch.setattr("sys.argv", ["collecting", str(folder), str(out)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert 2 == ended.value.code
    assert str(folder) in capsys.readouterr().err
    assert not out.exists()
    folder.mkdir()
    sample = {"key": "a/0", "group": "a/0", "columns": {}}
    (folder / "answers-0.jsonl").write_text(json.dumps(sample) + "\n")
    rewards = [{"key": key, "reward": 1.0} for key in ("a/0", "b/0")]
    (folder / "rewards-0.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rewards))
    main()
    printed = capsys.readouterr()
    assert "1 samples" in printed.out
    assert "1 rewards" in printed.err
    assert "b/0" in printed.err
