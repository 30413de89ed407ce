"""Real MCP servers as tools, over stdio and HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from jackfield_pools import alive, until_gone
from jackfield_testing import refused

from .conftest import Worker, call, opened, with_tools

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO: dict[str, Any] = {"mcp": {"command": [sys.executable, str(SERVER)], "env": {"TOOL_SETTING": "given"}}}


@contextlib.asynccontextmanager
async def http_server(port: int) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Run the server at a port until the end of the block."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                break
            except OSError:
                assert process.poll() is None
                await asyncio.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_the_tools_of_a_server_are_listed_and_called(tmp_path: Path) -> None:
    settings = {"server": {**STDIO, "include": ["add", "secret"], "prefix": "my_"}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        results = await asyncio.gather(
            call(tools, "my_add", a=1), call(tools, "my_add", a="x"), call(tools, "my_add"), call(tools, "my_secret")
        )
        return tools.schemas, results

    schemas, (added, wrong, missing, secret) = with_tools(tmp_path, settings, work)
    assert ["my_add", "my_secret"] == [schema["function"]["name"] for schema in schemas]
    assert "Add two numbers." == schemas[0]["function"]["description"]
    expected = {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}}
    assert expected == schemas[0]["function"]["parameters"]["properties"]
    assert (False, "3") == (added.is_error, added.text)
    assert (True, True) == (wrong.is_error, missing.is_error)
    assert "at a" in wrong.text
    assert "'a' is a required property" in missing.text
    assert "given" == secret.text


def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    """Calls that it had are errors, except those that may be repeated; later calls find another process."""

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        hanging = asyncio.create_task(call(tools, "hang"))
        first = await call(tools, "process")
        repeated = await call(tools, "process")  # it died with this call, and another process answered
        died = await call(tools, "die")
        return first, repeated, died, await hanging, await call(tools, "add", a=1)

    first, repeated, died, hanging, after = with_tools(tmp_path, {"server": STDIO}, work)
    assert [False, False, True, True, False] == [each.is_error for each in (first, repeated, died, hanging, after)], (
        first,
        repeated,
        died,
        hanging,
        after,
    )
    assert first.text != repeated.text
    assert "connection to its server was lost" in died.text
    for pid in (int(first.text), int(repeated.text)):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_server_that_died_between_calls_is_noticed(tmp_path: Path) -> None:
    """The next call is not the one that fails: the end of the server's output is seen."""

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        pid = int((await call(tools, "process")).text)
        [source] = worker.toolbox._sources
        connection = source._connection  # type: ignore[attr-defined]
        os.kill(pid, 9)
        await asyncio.wait_for(connection._leave.wait(), 20)
        return await call(tools, "add", a=40)

    assert "42" == with_tools(tmp_path, {"server": STDIO}, work).text


def test_a_deadline_shorter_than_the_start_of_a_server_does_not_keep_it_from_starting(tmp_path: Path) -> None:
    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        pid = int((await call(tools, "process")).text)
        [source] = worker.toolbox._sources
        os.kill(pid, 9)
        await asyncio.wait_for(source._connection._leave.wait(), 20)  # type: ignore[attr-defined]
        late = await call(tools, "add", a=1)
        await asyncio.wait_for(asyncio.shield(source._connection._opened), 40)  # type: ignore[attr-defined]
        return late, await call(tools, "add", a=1)

    late, after = with_tools(tmp_path, {"server": {**STDIO, "seconds": 0.2}}, work)
    assert (True, "add did not answer within 0.2 s") == (late.is_error, late.text)
    assert "3" == after.text


def test_a_late_or_cancelled_call_leaves_the_session_as_it_is(tmp_path: Path) -> None:
    settings = {"server": {**STDIO, "seconds": 0.3}}

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        pid = await call(tools, "process")
        late = await call(tools, "hang")
        cancelled = asyncio.create_task(call(tools, "hang"))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.wait({cancelled})
        assert cancelled.cancelled()
        after = await call(tools, "add", a=1)
        os.kill(int(pid.text), 0)  # the same process
        return late, after

    late, after = with_tools(tmp_path, settings, work)
    assert (True, "hang did not answer within 0.3 s") == (late.is_error, late.text)
    assert "3" == after.text


def test_a_server_that_hangs_is_ended_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A call beside the late one is an error at once, and the next call finds another process."""
    monkeypatch.setattr("jackfield_tools.mcp_servers._ALIVE_SECONDS", 0.3)

    async def work(worker: Worker) -> Any:
        tools = worker.rollout()
        pid = int((await call(tools, "process")).text)
        [source] = worker.toolbox._sources
        beside = asyncio.create_task(call(tools, "hang"))
        late = await call(tools, "freeze")
        waiting = source._checking  # type: ignore[attr-defined]
        await asyncio.wait({waiting})
        assert not alive(pid)
        await asyncio.wait_for(source.client(), 40)  # type: ignore[attr-defined]  # its start may outlast a call
        return late, await beside, await call(tools, "add", a=1)

    late, beside, after = with_tools(tmp_path, {"server": {**STDIO, "seconds": 2.0}}, work)
    assert (True, "freeze did not answer within 2 s") == (late.is_error, late.text)
    assert beside.is_error
    assert "3" == after.text
    assert any("MCP server of server hangs" in record.getMessage() for record in caplog.records)


RUN = """
import asyncio, sys
from pathlib import Path
from typing import Any
from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolCall
from jackfield_tools import Toolbox

async def main(server: str, folder: str) -> None:
    unused: Any = None
    entry = {"mcp": {"command": [sys.executable, server]}}
    toolbox = Toolbox({"server": entry}, AgentWorkerContext(tokenizer=unused, folder=Path(folder)))
    await toolbox.start()
    tools = toolbox.session(AgentContext(generate=unused, tokenizer=unused), {})
    await tools.call(ToolCall(name="freeze", arguments={"file": f"{folder}/pid"}))

asyncio.run(main(*sys.argv[1:]))
"""


def test_a_server_that_is_busy_ends_with_the_process_that_was_killed(tmp_path: Path) -> None:
    async def main() -> None:
        process = subprocess.Popen([sys.executable, "-c", RUN, str(SERVER), str(tmp_path)])
        try:
            file = tmp_path / "pid"
            while not file.exists():
                assert process.poll() is None
                await asyncio.sleep(0.02)
            pid = int(file.read_text())
            assert alive(pid)
        finally:
            process.kill()
            process.wait()
        await until_gone(pid)

    asyncio.run(main())


def test_a_server_over_http(tmp_path: Path) -> None:
    """It may be restarted: the next calls reach it."""

    async def main() -> Any:
        port = free_port()
        settings = {"server": {"mcp": {"url": f"http://127.0.0.1:{port}/mcp"}, "exclude": ["secret"]}}
        async with http_server(port), opened(tmp_path, settings) as worker:
            tools = worker.rollout()
            names = [schema["function"]["name"] for schema in tools.schemas]
            added = await call(tools, "add", a=1)
            hanging = asyncio.create_task(call(tools, "hang"))
            died = await call(tools, "die")
            unreachable = await call(tools, "add", a=1)
            async with http_server(port):
                again = await call(tools, "add", a=2)
            return names, added, died, await hanging, unreachable, again

    names, added, died, hanging, unreachable, again = asyncio.run(main())
    assert {"add", "die", "freeze", "hang", "process"} == set(names)
    assert "3" == added.text
    assert [True, True, True] == [each.is_error for each in (died, hanging, unreachable)]
    assert (False, "4") == (again.is_error, again.text)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"mcp": {"command": [sys.executable, "-c", "raise SystemExit(4)"]}}, "tools.server"),
        ({**STDIO, "include": ["nothing"]}, "nothing"),
        ({"mcp": {"command": [sys.executable, "-c", "input(); input()"]}, "start_seconds": 0.5}, "0.5 s"),
    ],
)
def test_a_server_that_does_not_start_is_named(tmp_path: Path, entry: dict[str, Any], says: str) -> None:
    async def work(worker: Worker) -> None:
        raise AssertionError

    with refused("tools.start", "tools.server", says):
        with_tools(tmp_path, {"server": entry}, work)
