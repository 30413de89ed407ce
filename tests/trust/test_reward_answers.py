"""A user's reward that forks, or writes to every descriptor it inherits, costs its own sample and no other."""

from __future__ import annotations

import asyncio
import json
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.reward import RewardContext, ScoreRequest, ScoreResult
from jackfield.plugins import discover
from jackfield_commands import CommandServer

pytestmark = pytest.mark.timeout(180)

#: A response is ``DEED NUMBER``; the right score is the number.
ATTACKS = """
import asyncio, ctypes, os, sys, threading, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    deed, number = solution_str.split()
    return globals()[deed](float(number))

def honest(number):
    return number

def forked(number):
    return number if os.fork() else -1.0

def forked_and_raising(number):
    if os.fork() == 0:
        raise SystemExit(0)
    return number

def forked_unseen(number):
    return number if ctypes.PyDLL(None).fork() else -1.0

async def forked_in_a_coroutine(number):
    await asyncio.sleep(0)
    return number if os.fork() else -1.0

def left_a_child_that_forges(number):
    if os.fork() == 0:
        time.sleep(0.2)
        everywhere(FORGED)
        os._exit(0)
    return number

FORGED = [b'{"value": 66.0}\\n', b'{"id": 1, "value": 66.0}\\n', b'{"id": null, "value": 66.0}\\n']

def everywhere(texts):
    for text in texts:
        for descriptor in range(256):
            try:
                os.write(descriptor, text)
            except OSError:
                pass

def wrote_garbage(number):
    everywhere([b"\\xff\\x00 garbage"])
    return number

def wrote_lines(number):
    everywhere([b"\\n[]\\n7\\n{}\\n"])
    return number

def forged(number):
    everywhere(FORGED)
    return number

def wrote_deep(number):
    everywhere([b"[" * 60000 + b"\\n"])
    return number

def closed(number):
    os.closerange(3, 256)
    return number

def forked_in_disguise(number):
    process = os.getpid()
    if ctypes.PyDLL(None).fork() == 0:
        os.getpid = lambda: process
        return 66.0
    return number

def left_a_thread_that_writes(number):
    def write():
        time.sleep(0.2)
        everywhere(FORGED)
    threading.Thread(target=write).start()
    return number

def slow(number):
    time.sleep(0.5)
    return number
"""


@pytest.fixture
def attacks(tmp_path: Path) -> str:
    (tmp_path / "attacks.py").write_text(ATTACKS)
    return f"{tmp_path / 'attacks.py'}:compute_score"


def score(path: str, responses: Sequence[str], **settings: Any) -> list[ScoreResult]:
    """Score the responses side by side through the contract; sample ``n`` has the key ``sample-n``."""

    async def main() -> list[ScoreResult]:
        agent = discover().load("reward", "function").build({"path": path, **settings}, RewardContext(), "reward")
        requests = [
            ScoreRequest(data_source="", solution_str=text, ground_truth="", idempotency_key=f"sample-{number}")
            for number, text in enumerate(responses)
        ]
        try:
            await agent.start()
            return list(await asyncio.gather(*map(agent.compute_score, requests)))
        finally:
            await agent.close()

    return asyncio.run(main())


def among_others(deed: str) -> list[str]:
    """Three attacks among honest samples."""
    return [f"{deed if number in (2, 3, 6) else 'honest'} {number}" for number in range(10)]


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    "deed",
    ["forked", "forked_and_raising", "forked_unseen", "forked_in_a_coroutine", "left_a_child_that_forges"],
)
def test_a_forked_child_answers_nothing(attacks: str, deed: str, workers: int) -> None:
    """Parent and child both end the call; the parent's score counts, and every sample has its own."""
    responses = [*among_others(deed), *(["slow 10", "honest 11"] if deed == "left_a_child_that_forges" else [])]
    results = score(attacks, responses, workers=workers)
    expected = [("ok", float(number)) for number in range(len(responses))]
    assert expected == [(each.status, each.score) for each in results]


@pytest.mark.parametrize("deed", ["wrote_garbage", "wrote_lines", "wrote_deep", "forged", "closed"])
def test_a_wrong_answer_fails_its_own_sample_by_name(attacks: str, deed: str) -> None:
    """A sample whose reward writes to every descriptor fails; every other sample has precisely its own score."""
    results = score(attacks, among_others(deed))
    for number, result in enumerate(results):
        if number not in (2, 3, 6):
            assert ("ok", float(number)) == (result.status, result.score), result.error
        else:
            assert ("failed", None) == (result.status, result.score)
            codes = ("[worker.answer]", "[worker.died]") if deed == "closed" else ("[worker.answer]",)
            assert (result.error or "").startswith(codes)
            assert f"sample-{number}" in (result.error or "")


def test_an_answer_that_comes_twice_changes_no_other_score(attacks: str) -> None:
    """A child that passes for its parent may answer its own call, and no other."""
    results = score(attacks, among_others("forked_in_disguise"))
    honest = [number for number in range(10) if number not in (2, 3, 6)]
    assert [("ok", float(number)) for number in honest] == [
        (results[number].status, results[number].score) for number in honest
    ]


def test_what_an_earlier_call_left_behind_costs_no_later_one(attacks: str) -> None:
    """A thread forges answers while a later sample is scored: that one is scored again, in a new process."""
    responses = ["left_a_thread_that_writes 0", "slow 1", "honest 2"]
    results = score(attacks, responses)
    assert [("ok", 0.0), ("ok", 1.0), ("ok", 2.0)] == [(each.status, each.score) for each in results]


def test_each_sample_of_a_run_has_its_own_reward(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    """A reward that forks at every other sample trains on what it says of each response."""
    (tmp_path / "forking.py").write_text(
        "import os, zlib\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    number = zlib.crc32(''.join(filter(str.isdigit, solution_str)).encode()) % 1000\n"
        "    return number if number % 2 or os.fork() else -1\n"
    )
    settings = ["reward.name=function", "reward.method=compute_score", "observe.samples_per_step=16"]
    path = f"reward.path={tmp_path / 'forking.py'}:compute_score"
    done = jackfield("run", *quickstart_settings("forking", *settings, path))
    assert 0 == done.code, done.error
    rows = [json.loads(line) for line in (tmp_path / "forking" / "samples" / "train.jsonl").read_text().splitlines()]
    assert 3 * 16 == len(rows)
    assert not (tmp_path / "forking" / "samples" / "failed.jsonl").exists()
    expected = [zlib.crc32("".join(filter(str.isdigit, row["response"])).encode()) % 1000 for row in rows]
    assert expected == [row["reward"] for row in rows]
    assert len(set(expected)) > 8
