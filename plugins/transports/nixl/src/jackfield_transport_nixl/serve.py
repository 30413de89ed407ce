"""The store's start, in this process or one of its own: ``python -m jackfield_transport_nixl.serve``.

That process reads its settings from standard input, writes its address to a file, and ends when it is killed, or when
the process that started it has ended in any way.
"""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import attrs

from jackfield.errors import QueueError
from jackfield_transport_nixl.agents import Agent, devices_of
from jackfield_transport_nixl.config import QueueConfig
from jackfield_transport_nixl.store import Store

_START_SECONDS = 60.0  #: it imports torch


async def started(settings: QueueConfig, host: str, file: Path, heartbeat_seconds: float) -> subprocess.Popen[bytes]:
    """Start the process, which writes its address to ``file``; ``queue.store`` if that fails."""
    order: dict[str, Any] = {"settings": attrs.asdict(settings), "host": host, "heartbeat_seconds": heartbeat_seconds}
    answers, answer = os.pipe()
    with os.fdopen(answers, "rb") as output:
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": 2, "pass_fds": [answer]}  # UCX may print something
        process: subprocess.Popen[bytes] = subprocess.Popen([sys.executable, "-m", __name__], **pipes)
        os.close(answer)
        try:
            assert process.stdin is not None
            order |= {"owner": os.getpid(), "file": str(file), "answer": answer}
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.close()
            await asyncio.to_thread(_heard, output, process)
        except BaseException:
            end(process)
            raise
    return process


def _heard(output: IO[bytes], process: subprocess.Popen[bytes]) -> None:
    """Wait until the store listens; raise its error."""
    ready, _, _ = select.select([output], [], [], _START_SECONDS)
    line = output.readline() if ready else b""
    if not line:
        raise QueueError(
            f"the process of the store did not start within {_START_SECONDS:g} s",
            code="queue.store",
            where=f"process {process.pid}",
            found=f"exit status {process.poll()}",
            fix="its standard error says why",
        )
    if error := json.loads(line):
        raise QueueError(code="queue.store", **error)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, which has nothing to save."""
    process.kill()
    process.wait()


async def listening(settings: QueueConfig, host: str, file: Path, heartbeat_seconds: float) -> Store:
    """Return a store in this process, which writes its address to ``file``; ``queue.store`` if that fails."""
    store = Store(settings, await agent_of(settings, host), heartbeat_seconds)
    try:
        (await store.listen(host, settings.port)).write(file)
    except BaseException:
        await store.close()
        raise
    return store


async def agent_of(settings: QueueConfig, host: str) -> Agent:
    """Return an agent that was started; ``queue.store`` if UCX cannot work with the devices."""
    agent = Agent(devices_of(settings.devices, host))
    try:
        await asyncio.wrap_future(agent.start())
    except OSError as error:
        await asyncio.to_thread(agent.close)
        where = f"UCX on {agent.devices or 'all devices'}"
        raise QueueError(f"NIXL cannot start: {error}", code="queue.store", where=where) from error
    return agent


def main() -> None:
    """Run the store."""
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a scheduler, to all processes; the owner decides
        signal.signal(number, signal.SIG_IGN)
    order: dict[str, Any] = json.loads(sys.stdin.readline())
    with suppress(ProcessLookupError):
        owner = os.pidfd_open(order["owner"])
        if os.getppid() == order["owner"]:
            asyncio.run(_serve(order, owner))


async def _serve(order: Mapping[str, Any], owner: int) -> None:
    gone = asyncio.Event()
    asyncio.get_running_loop().add_reader(owner, gone.set)
    settings, error = QueueConfig(**order["settings"]), dict[str, Any]()
    try:
        store = await listening(settings, order["host"], Path(order["file"]), order["heartbeat_seconds"])
    except QueueError as raised:
        error = {"message": raised.message, "where": raised.where, "fix": raised.fix}
    with os.fdopen(order["answer"], "w") as answer:
        print(json.dumps(error, default=str), file=answer)
    if not error:
        await gone.wait()
        assert store is not None, "kept until now"
    os._exit(0)  # memory and connections end with the process


if __name__ == "__main__":
    main()
