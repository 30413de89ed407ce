"""The pool of environments: reuse, limits, and what hangs, crashes or is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import AgentError, ConfigError, DeadlineExceeded, PluginError
from jackfield_environments import EnvironmentConfig, EnvironmentPool
from jackfield_pools import alive, until_gone
from jackfield_testing import in_loop

ROUGH = Path(__file__).with_name("rough.py")
EVERYWHERE = pytest.mark.parametrize("run", ["process", "thread", "inline"])


@contextlib.asynccontextmanager
async def opened(folder: Path, name: str = "Rough", **options: Any) -> AsyncIterator[EnvironmentPool]:
    settings = {"folder": str(folder), **options.pop("settings", {})}
    options = {"run": "process", "size": 2, "seconds": 30.0, **options}
    pool = EnvironmentPool(EnvironmentConfig(name=f"{ROUGH}:{name}", settings=settings, **options), name="agent-0")
    try:
        yield pool
    finally:
        await pool.close()
        assert 0 == pool.is_open


def count(folder: Path, kind: str) -> int:
    return len(list(folder.glob(f"{kind}-*")))


@EVERYWHERE
@pytest.mark.parametrize("name", ["Rough", "Slow"])
@in_loop
async def test_objects_are_reused_by_reset(tmp_path: Path, run: str, name: str) -> None:
    """One object serves one episode after the other, and is closed with the pool."""
    async with opened(tmp_path, name, run=run) as pool:
        for seed in range(3):
            async with pool.episode("task 1") as episode:
                seen = await episode.reset(seed=seed, level="hard", unknown=[1])
                assert f"seed {seed}, level hard" == seen.text
                for number in range(3):
                    step = await episode.step("walk")
                    assert ("did walk", 1.5, number == 2) == (step.text, step.reward, step.ended)
                assert (3, 4.5, True) == (episode.steps, episode.total, episode.ended)
        assert (1, 3, 9, 0) == (pool.counts.opened, pool.counts.episodes, pool.counts.steps, pool.counts.replaced)
        assert 1 == count(tmp_path, "made")
    assert 1 == count(tmp_path, "closed")


@EVERYWHERE
@in_loop
async def test_at_most_size_objects_exist_and_others_wait(tmp_path: Path, run: str) -> None:
    async with opened(tmp_path, run=run, size=2) as pool:
        most, pair = 0, asyncio.Barrier(2)

        async def play(number: int) -> None:
            nonlocal most
            async with pool.episode(f"task {number}") as episode:
                await episode.reset(seed=number)
                most = max(most, pool.is_open - len(pool._free))
                await pair.wait()
                await episode.step("walk")

        await asyncio.gather(*map(play, range(12)))
        assert 2 == most
        assert 2 == count(tmp_path, "made")
        assert 12 == pool.counts.episodes


@in_loop
async def test_objects_are_opened_when_they_are_needed(tmp_path: Path) -> None:
    async with opened(tmp_path, size=8) as pool:
        assert 0 == count(tmp_path, "made")
        await pool.start()
        assert 1 == pool.is_open
        async with pool.episode() as one, pool.episode() as other:
            await one.reset()
            await other.reset()
        assert 2 == count(tmp_path, "made")


@in_loop
async def test_a_wait_for_a_free_object_has_a_deadline(tmp_path: Path) -> None:
    async with opened(tmp_path, size=1, wait_seconds=0.05) as pool, pool.episode() as one:
        await one.reset()
        with pytest.raises(DeadlineExceeded) as caught:
            await pool.episode("task 2").reset()
        assert "environment.size" in str(caught.value)


@pytest.mark.parametrize("call", ["step", "reset"])
@in_loop
async def test_a_process_that_hangs_is_killed_replaced_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    """The error says which environment, which task and which call; a reset is tried again with another object."""
    settings = {"reset": "hang"} if call == "reset" else {}
    async with opened(tmp_path, seconds=0.3, settings=settings) as pool, pool.episode("task train:7") as episode:
        first = await episode.reset(seed=5)
        if call == "step":
            with pytest.raises(AgentError) as caught:
                await episode.step("hang")
            error = caught.value
            assert "agent.environment" == error.code
            assert "rough.py:Rough 0 of agent-0" in str(error)
            assert "task train:7, step('hang')" == error.where
            await until_gone(first.info["pid"])
            with pytest.raises(AgentError):
                await episode.step("walk")
            again = await episode.reset(seed=6)
            assert again.info["pid"] != first.info["pid"]
        assert 1 == pool.counts.replaced
        assert 1 == pool.is_open
        assert 2 == count(tmp_path, "made")
        [warning] = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert "task train:7" in warning.getMessage()
        assert "rough.py:Rough 0 of agent-0" in warning.getMessage()


@in_loop
async def test_a_thread_that_hangs_is_abandoned_and_ends_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its object is closed when the call returns at last."""
    monkeypatch.setenv("ROUGH_RELEASE", str(tmp_path / "release"))
    before = threading.active_count()
    async with opened(tmp_path, run="thread", seconds=0.1) as pool, pool.episode("task 1") as episode:
        first = await episode.reset()
        with pytest.raises(AgentError):
            await episode.step("hang")
        assert (await episode.reset()).info["id"] != first.info["id"]
        assert (await episode.step("walk")).text == "did walk"
    (tmp_path / "release").touch()
    for thread in threading.enumerate():
        if thread.name.startswith("environment"):
            await asyncio.to_thread(thread.join, 10.0)
    assert 2 == count(tmp_path, "closed")
    assert before >= sum(not each.name.startswith("asyncio") for each in threading.enumerate())


@in_loop
async def test_a_coroutine_that_never_ends_is_cancelled(tmp_path: Path) -> None:
    async with opened(tmp_path, "Slow", run="inline", seconds=0.05) as pool, pool.episode("task 1") as episode:
        await episode.reset()
        with pytest.raises(AgentError):
            await episode.step("wait")
        assert 1 == count(tmp_path, "closed"), "it can be asked to close"
        await episode.reset()
        assert 2 == count(tmp_path, "made")
        assert {asyncio.current_task()} == asyncio.all_tasks()


@EVERYWHERE
@pytest.mark.parametrize("action", ["raise", "odd", "infinite", "text"])
@in_loop
async def test_an_environment_that_fails_is_replaced(tmp_path: Path, run: str, action: str) -> None:
    """Its state is not known any more."""
    async with opened(tmp_path, run=run) as pool, pool.episode("task 3") as episode:
        await episode.reset()
        with pytest.raises(AgentError) as caught:
            await episode.step(action)
        assert "agent.environment" == caught.value.code
        says = {"raise": "the dragon", "odd": "too", "infinite": "inf", "text": "'1.0' (str)"}
        found = str(caught.value.found)
        assert says[action] in found
        if action != "raise":
            assert "_session.py" not in found
            assert 1 == len(found.splitlines())
        await episode.reset()
        assert 2 == count(tmp_path, "made")
        assert 1 == pool.counts.replaced


@pytest.mark.parametrize("end", ["hang", "crash"])
@pytest.mark.parametrize("says", [(), ("say something-",)])
@in_loop
async def test_an_error_shows_only_output_of_its_own_episode(tmp_path: Path, end: str, says: tuple[str, ...]) -> None:
    """The same process has printed before; what it printed without the end of a line counts, too."""
    async with opened(tmp_path, size=1, seconds=2.0) as pool:
        for action in ("say before", "say earlier-"):
            async with pool.episode("task 1") as episode:
                await episode.reset()
                await episode.step(action)
        async with pool.episode("task 2") as episode:
            await episode.reset()
            for action in says:
                await episode.step(action)
            with pytest.raises(AgentError) as caught:
                await episode.step(end)
        assert 1 == count(tmp_path, "made")
    found = str(caught.value.found)
    assert "before" not in found
    assert "earlier" not in found
    assert "an episode begins" not in found
    assert bool(says) == ("it printed:\nsay something" in found)
    assert bool(says) == ("printed" in found)


@in_loop
async def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    async with opened(tmp_path) as pool, pool.episode("task 3") as episode:
        await episode.reset()
        with pytest.raises(AgentError) as caught:
            await episode.step("crash")
        assert "exit status 3" in str(caught.value.found)
        assert "seed 1, level easy" == (await episode.reset(seed=1)).text


@EVERYWHERE
@in_loop
async def test_a_reset_that_fails_is_tried_again_at_most_so_often(tmp_path: Path, run: str) -> None:
    async with opened(tmp_path, run=run, settings={"reset": "raise"}, retries=1) as pool, pool.episode() as episode:
        await episode.reset()
        assert (2, 1) == (count(tmp_path, "made"), pool.counts.replaced)
    (tmp_path / "was-reset").unlink()
    async with opened(tmp_path, run=run, settings={"reset": "raise"}, retries=0) as pool, pool.episode() as episode:
        with pytest.raises(AgentError):
            await episode.reset()


@pytest.mark.parametrize(("run", "action"), [("process", "hang"), ("inline", "wait")])
@in_loop
async def test_a_cancelled_call_discards_the_object(tmp_path: Path, run: str, action: str) -> None:
    """Nothing of it continues, its place is free, and no warning calls it a failure."""
    async with opened(tmp_path, "Slow" if run == "inline" else "Rough", run=run, size=1) as pool:
        episode = pool.episode("task 1")
        first = await episode.reset()
        stepping = asyncio.create_task(episode.step(action))
        await asyncio.sleep(0)
        stepping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stepping
        await episode.release()
        assert (0, 0) == (pool.is_open, pool.counts.replaced)
        if run == "process":
            assert not alive(first.info["pid"])
        async with pool.episode("task 2") as other:
            await other.reset()


@EVERYWHERE
@in_loop
async def test_closing_ends_objects_that_are_in_use(tmp_path: Path, run: str) -> None:
    async with opened(tmp_path, run=run) as pool:
        episode = pool.episode()
        seen = await episode.reset()
        await pool.close()
        await episode.release()
        with pytest.raises(AgentError):
            await pool.episode().reset()
    if run == "process":
        assert not alive(seen.info["pid"])


@EVERYWHERE
@in_loop
async def test_an_environment_that_cannot_be_made_is_refused_at_the_start(tmp_path: Path, run: str) -> None:
    async with opened(tmp_path, run=run, settings={"make": "raise"}) as pool:
        with pytest.raises(AgentError) as caught:
            await pool.start()
        assert "the dragon" in str(caught.value.found)
        assert 0 == pool.is_open


@EVERYWHERE
@in_loop
async def test_a_missing_package_is_named(tmp_path: Path, run: str) -> None:
    pool = EnvironmentPool(EnvironmentConfig(name=f"{ROUGH}:needs_a_package", run=run))  # type: ignore[arg-type]
    try:
        with pytest.raises(PluginError) as caught:
            await pool.start()
    finally:
        await pool.close()
    assert "plugin.requirement" == caught.value.code
    assert "a-package-that-is-nowhere" in caught.value.message


@pytest.mark.parametrize("name", ["nothing", "nowhere.py:Class", ":Class", "module:"])
def test_wrong_names_are_refused_early(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EnvironmentConfig(name=name)
    assert "environment.name" == caught.value.where


@EVERYWHERE
@in_loop
async def test_a_name_that_is_no_class_is_refused(run: str) -> None:
    for name in ("Nowhere", "value"):
        pool = EnvironmentPool(EnvironmentConfig(name=f"{ROUGH}:{name}", run=run))  # type: ignore[arg-type]
        try:
            with pytest.raises((AgentError, ConfigError)):
                await pool.start()
        finally:
            await pool.close()


def test_another_interpreter_needs_processes() -> None:
    with pytest.raises(ConfigError) as caught:
        EnvironmentConfig(name="household", run="inline", python="python3")
    assert "environment.python" == caught.value.where


@in_loop
async def test_an_environment_runs_in_an_interpreter_without_jackfield(tmp_path: Path) -> None:
    """The game and the adapters need only the standard library, and their own packages."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {os.path.realpath("/proc/self/exe")} -I -S "$@"\n')
    python.chmod(0o755)
    pool = EnvironmentPool(EnvironmentConfig(name="household", python=str(python)))
    try:
        async with pool.episode() as episode:
            seen = await episode.reset(seed=4)
            assert "kitchen" in seen.text
            assert (await episode.step(seen.info["actions"][0])).info["possible"]
    finally:
        await pool.close()
