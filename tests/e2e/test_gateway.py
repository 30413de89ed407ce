"""Programs that know nothing of Jackfield are trained through the gateway."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from jackfield.queue import read_ledger
from jackfield_commands import Command, CommandServer
from jackfield_huggingface.relay import RelayServer

from .conftest import ROOT, Run, metrics
from .test_modes import steps

pytestmark = pytest.mark.timeout(300)

Settings = Callable[..., list[str]]
EXAMPLE = ROOT / "examples" / "openai_program"


def post(url: str, key: str, body: Any) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


async def run_agents(address: str, count: int, key: str = "any") -> int:
    """Solve tasks with an agent of the library openai-agents, until the run gives no more; return how many."""
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)

    async def work() -> int:
        done = 0
        while True:
            try:
                given = await asyncio.to_thread(post, f"{address}/rollouts", key, {})
            except (urllib.error.URLError, ConnectionError):  # the run has ended
                return done
            async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["key"], max_retries=0) as client:
                model = agents.OpenAIChatCompletionsModel(model="policy", openai_client=client)
                agent = agents.Agent(name="solver", model=model)
                result = await agents.Runner.run(agent, given["task"]["question"])
                text = str(result.final_output)
            body = {"reward": float(len(text) % 2), "metrics": {"letters": len(text)}}
            await asyncio.to_thread(post, f"{address}/rollouts/{given['id']}/finish", given["key"], body)
            done += 1

    return sum(await asyncio.gather(*(work() for _ in range(count))))


def listening(command: Command) -> str:
    """Return the address at which the gateway listens, once it does."""
    while "gateway: " not in command.out:
        assert command.running, command.out + command.error
        time.sleep(0.01)
    return command.out.partition("gateway: ")[2].split()[0]


def check_trained(folder: Path, samples: int) -> None:
    """Check that the trainer has taken so many samples, each once."""
    entries = [entry for entry in read_ledger(folder) if entry["event"] == "ack" and entry["consumer"] == "trainer"]
    trained = [key for entry in entries for key in entry["keys"]]
    assert len(trained) == len(set(trained)) == samples


def test_agents_of_a_library_are_trained_by_changing_their_base_url(
    jackfield: CommandServer, quickstart_settings: Settings, tmp_path: Path
) -> None:
    """Two steps of a real run whose rollouts are agents elsewhere: each sample is acknowledged once."""
    small = ("data.groups_per_batch=2", "data.rollouts_per_group=4", "schedule.steps=2", "log_prob_check.every=1")
    command = jackfield.start("gateway", *quickstart_settings("agents", *small))
    address = listening(command)
    assert f"{address}\n" == (tmp_path / "agents" / "gateway.txt").read_text()
    done = asyncio.run(run_agents(address, 4))
    assert 0 == command.wait().code, command.out + command.error
    lines = steps(metrics(tmp_path / "agents"))
    assert [1, 2] == [line["step"] for line in lines]
    check_trained(tmp_path / "agents", 16)
    assert done >= 16
    for line in lines:
        assert 0.0 <= line["reward/mean"] <= 1.0
        assert line["agent/letters/mean"] > 0
        assert line["agent/sequences/mean"] == 1.0


@pytest.fixture
def plain_server(tmp_path: Path) -> Path:
    """The folder of a rollout server of a third party, built for ABI 1.0, that has no address of its own."""
    [wheel] = (ROOT / "tests" / "conformance" / "kept").glob("jackfield_rollout_plain-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path / "site"


def own_address() -> str:
    """Return an address of this machine that is not loopback."""
    found = [each for listed in psutil.net_if_addrs().values() for each in listed if each.family == socket.AF_INET]
    addresses = [each.address for each in found if not each.address.startswith("127.")]
    return addresses[0] if addresses else pytest.skip("this machine has no network interface but loopback")


def test_beyond_loopback_programs_need_the_key_and_another_server_gets_an_address(
    jackfield: CommandServer, quickstart_settings: Settings, plain_server: Path, tmp_path: Path
) -> None:
    """The gateway listens where other machines reach it; the rollout server knows nothing of it."""
    host, variables = own_address(), {"GATEWAY_KEY": "secret", "PYTHONPATH": str(plain_server)}
    small = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "schedule.steps=1", "rollout={name: plain}")
    settings = quickstart_settings("beyond", *small, "agent={name: gateway, api_key_env: GATEWAY_KEY}")
    command = jackfield.start("gateway", *settings, "--host", host, environment=variables)
    address = listening(command)
    assert address.startswith(f"http://{host}:")
    messages: Any = [{"role": "user", "content": "1+1"}]
    for key in ("none", "none/group/1", "secre/group/1"):
        client = openai.OpenAI(base_url=address, api_key=key, max_retries=0)
        with client, pytest.raises(openai.AuthenticationError):
            client.chat.completions.create(model="policy", messages=messages)
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{address}/rollouts", key, {})
    assert asyncio.run(run_agents(address, 4, "secret")) >= 4
    assert 0 == command.wait().code, command.out + command.error
    check_trained(tmp_path / "beyond", 4)


STREAMING = """
import openai
from jackfield_huggingface.relay import RelayServer

async def solve(task, base_url, api_key):
    text, chunks = "", 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": task["question"]}]
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            if not chunks:
                RelayServer.heard.release()
            chunks += 1
            text += chunk.choices[0].delta.content or ""
    return {"reward": float(len(text) % 2), "metrics": {"chunks": chunks}}
"""


def test_streaming_programs_hear_the_first_token_before_the_last_is_generated(
    small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer's last token is held back until a client has heard a first one, and is trained on as it was said."""
    generate_stream, streams = RelayServer.generate_stream, list[str]()

    async def held(self: Any, request: Any) -> AsyncIterator[Any]:
        count = 0
        async with contextlib.aclosing(generate_stream(self, request)) as chunks:
            async for chunk in chunks:
                if count and chunk.finish_reason is not None:
                    streams.append(request.request_id)
                    await RelayServer.heard.acquire()  # type: ignore[attr-defined]
                yield chunk
                count += 1

    monkeypatch.setattr(RelayServer, "generate_stream", held)
    monkeypatch.setattr(RelayServer, "heard", asyncio.Semaphore(0), raising=False)
    (tmp_path / "streaming.py").write_text(STREAMING)
    program = f"program: {{call: '{tmp_path / 'streaming.py'}:solve', process: false}}"
    _, lines = small_run(
        "streamed", f"agent={{name: gateway, {program}}}", "schedule.steps=2", "log_prob_check.every=1"
    )
    found = steps(lines)
    assert [16.0, 16.0] == [line["samples"] for line in found]
    assert len(streams) > 16
    for line in found:
        assert line["agent/chunks/mean"] > 3
        assert line["log_prob_check/rollout/max"] < 1e-3


@pytest.mark.timeout(900)
def test_an_unmodified_program_learns(jackfield: CommandServer, tmp_path: Path) -> None:
    """The example: after its warm-up, a program's rewards rise with the model that answers it."""
    folder = tmp_path / "example"
    settings = ["--warmup", "evaluation.every=0", "schedule.steps=10", "evaluation.every=10"]
    file = str(EXAMPLE / "openai_program.py")
    command = jackfield.start(file, "--folder", str(folder), *settings, program="python", folder=tmp_path)
    done = command.wait(840)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    lines = metrics(folder / "grpo")
    scores = [line["score"] for line in lines if line["kind"] == "evaluation"]
    rewards = [line["reward/mean"] for line in steps(lines)]
    assert 0.2 <= scores[0] <= 0.5
    assert scores[-1] >= scores[0] + 0.15, scores
    assert sum(rewards[-3:]) >= sum(rewards[:3]) + 0.3, rewards


def test_the_program_of_the_example_runs_without_jackfield() -> None:
    """It imports nothing of ours."""
    text = (EXAMPLE / "program.py").read_text()
    assert "jackfield" not in text.lower()
