"""A service as a process of its own, a reward that can be held, and clients of it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest
from jackfield.plugins import load_plugin
from jackfield_held import HeldCalls

_FUNCTION = '''
import socket


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """Write down each call; those of a "held" sample wait for the other end of a socket."""
    folder = extra_info["folder"]
    with open(f"{folder}/calls", "a") as calls:
        calls.write(solution_str + "\\n")
    if "held" in solution_str:
        with socket.socket(socket.AF_UNIX) as waiting:
            waiting.connect(f"{folder}/held")
            waiting.send(b"?")
            waiting.recv(1)
    if "broken" in solution_str:
        raise ValueError("a broken sample")
    return {"score": float(len(solution_str)), "letters": len(solution_str)}
'''


class Process:
    """A running `jackfield rewards serve`."""

    def __init__(self, process: asyncio.subprocess.Process, said: dict[str, Any]) -> None:
        self.process, self.said = process, said

    async def end(self, number: int = signal.SIGKILL) -> int:
        """Send a signal and wait for the end."""
        self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 30)


Serve = Callable[..., AbstractAsyncContextManager[Process]]


@asynccontextmanager
async def serving(folder: Path, environment: dict[str, str] | None = None, **settings: Any) -> AsyncIterator[Process]:
    """Serve the reward ``held`` with two workers; kill the service at the end if it is still there.

    ``comment`` is added to its function's file.
    """
    (folder / "function.py").write_text(_FUNCTION + settings.pop("comment", ""))
    held = {"name": "function", "path": f"{folder / 'function.py'}:compute_score", "workers": 2}
    rewards = {"held": {"reward": held, "reward_service": settings.pop("reward_service", {})}}
    values = {"folder": str(folder / "service"), "rewards": rewards, **settings}
    (folder / "serve.yaml").write_text(yaml.safe_dump(values))
    code = "from jackfield.cli import main; main()"
    command = [sys.executable, "-c", code, "rewards", "serve", str(folder / "serve.yaml"), "--json"]
    pipe, variables = asyncio.subprocess.PIPE, {**os.environ, **(environment or {})}
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, env=variables)
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 30)
        yield Process(process, json.loads(line))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """``async with serve(**settings) as process``: a service in ``tmp_path``."""
    return lambda *args, **settings: serving(tmp_path, *args, **settings)


@pytest.fixture
def free_port() -> int:
    """A port that was free a moment ago."""
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@asynccontextmanager
async def connected(address: str | Path, run: str = "a run", **settings: Any) -> AsyncIterator[RewardAgent]:
    """Start the reward ``service`` as a run does."""
    options = {"address": str(address), "served": "held", **settings}
    agent: RewardAgent = load_plugin("reward", "service").build(options, RewardContext(run=run))
    try:
        await agent.start()
        yield agent
    finally:
        await agent.close()


class Held(HeldCalls):
    """The other end of calls that are held, and the samples of all."""

    @property
    def calls(self) -> list[str]:
        """The samples of all calls so far."""
        return (self.folder / "calls").read_text().split()


def request(folder: Path, text: str, **fields: Any) -> ScoreRequest:
    """Return the request of a sample."""
    options = {"idempotency_key": f"train/{text}", "extra_info": {"folder": str(folder)}, **fields}
    return ScoreRequest(**{"data_source": "d", "solution_str": text, "ground_truth": "", **options})
