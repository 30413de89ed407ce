"""verifiers and OpenEnv, the real packages, in the interpreter of ``make interpreters``."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.errors import AgentError
from jackfield_environments import EnvironmentConfig, EnvironmentPool, Episode
from jackfield_testing import agents_python, in_loop

pytestmark = [pytest.mark.needs("agents"), pytest.mark.timeout(600)]  # their first imports compile a thousand files

#: An OpenEnv server on a free port of loopback, which it prints. It ends with its standard input.
SERVER = """
import socket
import sys
import threading

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    kind: str
    number: str


class Told(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed=None, episode_id=None, **fields):
        self.hidden, self.left = (seed or 0) % 10, 2
        return Told(text="Which digit?")

    def step(self, action, timeout_s=None, **fields):
        if action.kind != "guess":
            return Told(text=f"no {action.kind}", reward=-1, done=True)
        self.left -= 1
        found = int(action.number) == self.hidden
        word = "found" if found else "higher" if int(action.number) < self.hidden else "lower"
        return Told(text=word, reward=float(found), done=found or not self.left)


listening = socket.create_server(("127.0.0.1", 0))
app = create_app(Game, Guess, Told, env_name="game", max_concurrent_envs=4)
server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))


def end():
    sys.stdin.read()
    server.should_exit = True


threading.Thread(target=end, daemon=True).start()
print(listening.getsockname()[1], flush=True)
server.run(sockets=[listening])
"""

TASKSET = """
import verifiers.v1 as vf


class Sum(vf.TaskData):
    answer: str


class SumTask(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward(weight=2.0)
    async def right(self, trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward
    async def in_a_sandbox(self, trace, runtime) -> float:
        raise AssertionError("there is no runtime")

    @vf.metric
    async def length(self, trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 1


class Sums(vf.Taskset[SumTask, SumsConfig]):
    def load(self):
        for number in range(self.config.largest):
            yield SumTask(Sum(prompt=f"{number} + 2 =", system_prompt="Add.", answer=str(number + 2)))
"""


@contextlib.asynccontextmanager
async def playing(name: str, **settings: Any) -> AsyncIterator[Episode]:
    python = str(agents_python())
    config = EnvironmentConfig(
        name=name, python=python, settings=settings, size=1, seconds=120, start_seconds=500, memory_bytes=None
    )
    pool = EnvironmentPool(config)
    try:
        async with pool.episode() as episode:
            yield episode
    finally:
        await pool.close()


@pytest.fixture
def address() -> Iterator[str]:
    """The address of a running OpenEnv server."""
    command = [str(agents_python()), "-W", "ignore", "-c", SERVER]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        port = server.stdout.readline().strip()
        assert port, "the server has ended"
        yield f"http://127.0.0.1:{port}"
    finally:
        server.stdin.close()
        assert 0 == server.wait(60)
        server.stdout.close()


@in_loop
async def test_openenv_plays_on_a_server(address: str) -> None:
    """Episodes over its WebSocket: the seed arrives, as do all fields of an action; text, reward and end come back."""
    settings: Any = {"url": address, "action": "number", "observation": "text", "settings": {"kind": "guess"}}
    async with playing("openenv", **settings) as episode:
        assert "Which digit?" == (await episode.reset(seed=14)).text
        first, second = await episode.step("3"), await episode.step("4")
        assert ("higher", 0.0, False) == (first.text, first.reward, first.ended)
        assert ("found", 1.0, True) == (second.text, second.reward, second.terminated)
        await episode.reset(seed=7)
        assert ("lower", 0.0, False) == ((step := await episode.step("8")).text, step.reward, step.ended)
        with pytest.raises(AgentError) as caught:
            await episode.step("a word")
        assert "agent.environment" == caught.value.code


@in_loop
async def test_verifiers_scores_answers(tmp_path: Path) -> None:
    """Its weighted reward, without the one that needs a runtime; the task of an index, and else of the seed."""
    (tmp_path / "sums.py").write_text(TASKSET)
    async with playing("verifiers", taskset=f"{tmp_path / 'sums.py'}:Sums", settings={"largest": 5}) as episode:
        seen = await episode.reset(seed=3)
        assert ("Add.\n\n3 + 2 =", 3) == (seen.text, seen.info["task_index"])
        step = await episode.step(" 5\n")
        assert (2.0, True, 1.0) == (step.reward, step.terminated, step.info["metrics"]["length"])
        assert {"right": 1.0} == step.info["rewards"]
        assert "1 + 2 =" in (await episode.reset(seed=3, task_index=1)).text
        assert 0.0 == (await episode.step("5")).reward
