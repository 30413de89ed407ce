"""Programs that the gateway starts: functions and commands."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.agent import AgentLoopOutput
from jackfield.errors import AgentError, JackfieldError

FILE = Path(__file__).with_name("programs_for_tests.py")


def program(kind: str, name: str) -> dict[str, Any]:
    """Return settings: a function in a process or in the worker, or a command."""
    if kind == "command":
        command = [sys.executable, str(FILE), name]
        return {"command": command, "reward_from": "last_line" if name == "last_line" else "file"}
    return {"call": f"{FILE}:{name}", "process": kind == "process", "workers": 1}


def play(serve: Any, kind: str, name: str, exact: Any = None, **settings: Any) -> AgentLoopOutput:
    async def run() -> AgentLoopOutput:
        async with serve(program=program(kind, name), **settings) as served:
            output = await served.run()
            if exact is not None:
                exact(served.model, output.sequences)
            return output  # type: ignore[no-any-return]

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("kind", "name", "turns", "reward"),
    [
        ("process", "ask", 1, 8.0),
        ("process", "converse", 2, None),
        ("worker", "converse", 2, None),
        ("command", "file", 1, 8.0),
        ("command", "last_line", 1, 8.0),
        ("command", "no_reward", 1, None),
    ],
)
def test_a_program_is_recorded_with_its_reward(
    serve: Any, exact: Any, kind: str, name: str, turns: int, reward: float | None
) -> None:
    """Sync and async functions in processes and in the worker, and commands with each way to give a reward."""
    output = play(serve, kind, name, exact)
    assert (turns, "answered", [reward]) == (output.num_turns, output.end_reason, [s.reward for s in output.sequences])
    assert output.metrics.get("length") == (2.0 if name in ("ask", "file") else None)


@pytest.mark.parametrize(
    ("kind", "name", "found"),
    [
        ("process", "fail", "bad day"),
        ("process", "crash", "3"),
        ("command", "fail", "exit code 1: bad day"),
        ("process", "silent", "no reward"),
        ("process", "misspell", "metrcs"),
    ],
)
def test_a_program_that_fails_fails_its_rollout(serve: Any, kind: str, name: str, found: str) -> None:
    """The error says what the program said; the worker goes on."""
    with pytest.raises(AgentError) as error:
        play(serve, kind, name)
    assert "agent.program" == error.value.code
    assert found in str(error.value.found)


@pytest.mark.parametrize("kind", ["process", "command"])
@pytest.mark.parametrize("name", ["fail", "hang"])
def test_what_a_failed_or_late_program_has_done_can_be_kept(serve: Any, exact: Any, kind: str, name: str) -> None:
    """With ``on_failure: keep`` the recorded turns are samples, without the program's reward."""
    options: dict[str, Any] = {"seconds": 5.0} if name == "hang" else {}
    output = play(serve, kind, name, exact, on_failure="keep", **options)
    assert ("failed", [None]) == (output.end_reason, [sequence.reward for sequence in output.sequences])


def test_nothing_is_kept_of_an_attempt_that_died_with_another_rollout_s_program(
    serve: Any, exact: Any, tmp_path: Path
) -> None:
    """The innocent program runs again under another key: turns, reward and metrics are those of that run alone."""
    file = tmp_path / "asked"

    async def run() -> None:
        async with serve(program=program("process", "share")) as served:
            innocent, guilty = await asyncio.gather(served.run(str(file)), served.run("crash"), return_exceptions=True)
            assert isinstance(guilty, AgentError)
            assert ("agent.program", 2) == (guilty.code, len(served.model.said))
            (sequence,) = innocent.sequences
            assert (served.model.said[1], None) == (sequence.response_ids, sequence.reward)
            assert (1, 1.0, None) == (innocent.num_turns, innocent.metrics["restarts"], innocent.metrics.get("dead"))
            assert ["restart"] == [name for name, _ in served.events]

    asyncio.run(run())


def test_a_call_that_is_made_again_in_another_process_is_recorded_once(serve: Any) -> None:
    """A process may have died of an earlier call: its call is made again, and only its last attempt may be kept."""

    async def run() -> None:
        async with serve(program=program("process", "crash"), on_failure="keep") as served:
            assert 0.0 == (await served.run("well")).metrics["restarts"]
            kept = await served.run("bad")
            assert 3 == len(served.model.said)
            assert [served.model.said[2]] == [sequence.response_ids for sequence in kept.sequences]
            assert (1, 1.0, "failed") == (kept.num_turns, kept.metrics["restarts"], kept.end_reason)

    asyncio.run(run())


def test_the_output_of_commands_is_in_the_worker_s_log(serve: Any, tmp_path: Path) -> None:
    """Also that of a program that was killed at its deadline."""
    logs = tmp_path / "logs" / "agent-0"

    async def run() -> None:
        async with serve(program=program("command", "talk"), logs=str(logs)) as served:
            await served.run()
        code = "print('still here', flush=True); import time; time.sleep(600)"
        late = {"command": [sys.executable, "-c", code]}
        async with serve(program=late, logs=str(logs), seconds=5.0) as served:
            with pytest.raises(AgentError):
                await served.run()

    asyncio.run(run())
    said = Path(f"{logs}-command.log").read_text()
    assert ["on output", "on errors", "still here"] == [line for line in said.splitlines() if not line.startswith("--")]
    assert 1 == said.count(": exit code 0\n")


@pytest.mark.parametrize("kind", ["process", "command"])
def test_a_cancelled_rollout_leaves_no_process_of_its_program(serve: Any, kind: str) -> None:
    """The deadline of a rollout kills a program that blocks; the next one runs."""

    async def run() -> None:
        async with serve(program=program(kind, "hang")) as served:
            before = running()
            rollout = asyncio.create_task(served.run())
            while not served.model.said:
                assert not rollout.done(), rollout
                await asyncio.sleep(0.01)
            rollout.cancel()
            with pytest.raises(asyncio.CancelledError):
                await rollout
            while running() - before and kind == "process":  # its pool ends it in a quarter of a second
                await asyncio.sleep(0.01)
            assert not running() - before

    def running() -> set[str]:
        found = set()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = path.read_bytes()
            except OSError:
                continue
            if b"programs_for_tests" in text and b"hang" in text:
                found.add(path.parent.name)
        return found

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"call": f"{FILE}:ask", "process": False}, "config.invalid-value"),
        ({"call": f"{FILE}:nothing", "process": False}, "config.invalid-value"),
        ({"call": f"{FILE}:nothing"}, "worker.start"),
    ],
)
def test_a_program_that_cannot_be_loaded_is_refused_at_the_start(serve: Any, settings: Any, code: str) -> None:
    """The worker does not start, and leaves nothing."""

    async def run() -> None:
        async with serve(program=settings):
            pytest.fail("it has started")

    with pytest.raises(JackfieldError) as error:
        asyncio.run(run())
    assert code == error.value.code
