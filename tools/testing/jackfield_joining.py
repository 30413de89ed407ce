"""Processes that join a queue's backend and read each other's values while the process that opened it stands still."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import attrs
import torch

from jackfield.abc.transfer_queue import GetRequest, PutRequest, TransferQueueBackend, TransferQueueContext
from jackfield.sdk.cells import dense_column

WIDTHS = (8, 1 << 16)  #: float32 of a row: less than any backend moves apart from its messages, and more
ROWS = 8


def check_values_go_straight(cls: type[TransferQueueBackend], settings: Any, folder: Path) -> None:
    """What one worker puts, another reads, while the process that opened the queue is stopped.

    The controller of a run is that process; values that went through it could not arrive.
    """
    assert cls.joins
    with ExitStack() as stack:
        owner = stack.enter_context(_part("owner", cls, settings, folder))
        assert "ready" == _heard(owner)
        writer, reader = (stack.enter_context(_part(role, cls, settings, folder)) for role in ("writer", "reader"))
        assert ("ready", "ready") == (_heard(writer), _heard(reader))
        owner.send_signal(signal.SIGSTOP)
        try:
            for width in WIDTHS:
                assert "done" == _asked(writer, width)
                assert str(int(_values(width).sum())) == _asked(reader, width)
        finally:
            owner.send_signal(signal.SIGCONT)
        assert str(ROWS * len(WIDTHS)) == _asked(owner, 0)


def _values(width: int) -> torch.Tensor:
    return torch.arange(ROWS * width, dtype=torch.float32).reshape(ROWS, width) % 1000


@contextmanager
def _part(role: str, cls: type, settings: Any, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has opened or joined the queue; it ends with its standard input."""
    names = [f"{each.__module__}:{each.__qualname__}" for each in (cls, type(settings))]
    command = [sys.executable, __file__, role, *names, json.dumps(attrs.asdict(settings)), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
            assert process.stdin is not None
            process.stdin.close()
            process.wait()
        finally:
            process.kill()


def _asked(process: subprocess.Popen[str], width: int) -> str:
    assert process.stdin is not None
    print(width, file=process.stdin, flush=True)
    return _heard(process)


def _heard(process: subprocess.Popen[str]) -> str:
    """The next answer; other lines are a library's."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("answer "):
            return line.split()[1]
    raise AssertionError(f"process {process.pid} has ended")


def _loaded(name: str) -> Any:
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


async def _act(role: str, cls: str, config: str, settings: str, folder: str) -> None:
    context = TransferQueueContext(folder=folder, joins=role != "owner")
    backend: TransferQueueBackend = _loaded(cls)(_loaded(config)(**json.loads(settings)), context)
    await backend.start()
    print("answer ready", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        width = int(line)
        keys = tuple(f"{width}-{row}" for row in range(ROWS))
        if role == "writer":
            columns = {"x": dense_column(_values(width))}
            await backend.put(PutRequest(partition="p", keys=keys, columns=columns))
            answer: object = "done"
        elif role == "reader":
            found = await backend.get(GetRequest(partition="p", keys=keys, columns=("x",)))
            answer = int(found.columns["x"].values.sum())
        else:
            answer = (await backend.stats()).samples
        print("answer", answer, flush=True)
    await backend.close()


if __name__ == "__main__":
    asyncio.run(_act(*sys.argv[1:]))
