"""A user's command in a process of its own, which ends with everything that it has started."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield_user_code import _tree

_LAUNCHER = Path(__file__).with_name("_command.py")
_TAIL_BYTES = 1 << 16  #: of the end of each stream that is kept
_LAST_SECONDS = 1.0  #: to read what a killed command has written
_READ_BYTES = 1 << 16
_LINES = 10  #: of the output in messages
_LOG_BYTES = 4 * 2**20  #: a longer log gets the suffix .1, and a new one is begun


@attrs.frozen(kw_only=True)
class CommandLimits:
    """The limits of each process of a command."""

    memory_bytes: int | None = 4 * 2**30  #: of address space (RLIMIT_AS); None: unlimited
    cpu_seconds: int | None = None  #: of processor time (RLIMIT_CPU); None: unlimited


@attrs.frozen(kw_only=True)
class CommandResult:
    """How a command ended."""

    code: int  #: exit code; 128 and the signal's number if a signal ended it; 127: there is no such program
    output: str  #: the end of what it wrote to its standard output, at most 64 KiB
    errors: str  #: the same of its standard error

    @property
    def told(self) -> str:
        """The last lines of its output, for messages."""
        lines = [line for line in (self.errors.strip() or self.output.strip()).splitlines() if line.strip()]
        return "\n".join(lines[-_LINES:])


def tied_command(command: Sequence[str], limits: CommandLimits | None = None) -> list[str]:
    """Return a command line whose process ends, with all that it has started, when this process ends.

    It must be started from a thread that lives as long as the command. Without ``limits`` there are none.
    """
    limits = limits or CommandLimits(memory_bytes=None)
    numbers = (os.getpid(), limits.memory_bytes or 0, limits.cpu_seconds or 0)
    return [sys.executable, "-I", "-S", str(_LAUNCHER), *map(str, numbers), *command]


async def run_command(
    command: Sequence[str],
    *,
    stdin: bytes = b"",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    limits: CommandLimits | None = None,
    log: Path | None = None,
    name: str = "",
) -> CommandResult:
    """Run a command to its end, and return how it ended.

    When it ends, when this call is cancelled and when this process ends, everything that the command has started is
    killed, in whatever session it is. ``env`` is its whole environment; by default that of this process.

    The file ``log`` gets the end of both streams, under a line with ``name`` and the exit code, however the command
    ends. Several commands may share it; above 4 MiB it gets the suffix ``.1`` and a new one is begun.
    """
    limits = limits or CommandLimits()
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), asyncio.subprocess.PIPE)
    process = await asyncio.create_subprocess_exec(*tied_command(command, limits), **pipes, env=env, cwd=cwd)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    output, errors = _Tail(), _Tail()
    try:
        _, _, _, code = await asyncio.gather(
            output.read(process.stdout), errors.read(process.stderr), _feed(process.stdin, stdin), process.wait()
        )
    finally:
        try:
            await _kill(process, (output, errors))
        finally:
            if log is not None:
                _append(log, name, process.returncode, (output.text, errors.text))
    return CommandResult(code=code, output=output.text, errors=errors.text)


async def _kill(process: asyncio.subprocess.Process, tails: Sequence[_Tail]) -> None:
    """Kill a command with everything that it has started, wait until its process has ended, and read its last words."""
    if process.returncode is None:
        await asyncio.to_thread(_tree.kill_tree, process.pid)
        await asyncio.shield(process.wait())
    streams = [each for each in (process.stdout, process.stderr) if each is not None]
    with suppress(TimeoutError):
        async with asyncio.timeout(_LAST_SECONDS):
            await asyncio.gather(*(tail.read(stream) for tail, stream in zip(tails, streams, strict=True)))
    transport: asyncio.BaseTransport = process._transport  # type: ignore[attr-defined]
    transport.close()  # of the pipes, too


async def _feed(stream: asyncio.StreamWriter, text: bytes) -> None:
    with suppress(OSError):  # it does not read its input
        stream.write(text)
        await stream.drain()
    stream.close()
    with suppress(OSError):
        await stream.wait_closed()


class _Tail:
    """The last part of a stream."""

    def __init__(self) -> None:
        self._kept = b""

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read a stream to its end."""
        while piece := await stream.read(_READ_BYTES):
            self._kept = (self._kept + piece)[-_TAIL_BYTES:]

    @property
    def text(self) -> str:
        """Return what was read so far."""
        return self._kept.decode(errors="replace")


def _append(log: Path, name: str, code: int | None, texts: Sequence[str]) -> None:
    """Append the output of a command to a log; one that cannot be written does not fail the command."""
    lines = (text if text.endswith("\n") else f"{text}\n" for text in texts if text)
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        if log.is_file() and log.stat().st_size > _LOG_BYTES:
            log.replace(f"{log}.1")
        with log.open("a", encoding="utf-8") as file:
            file.write(f"-- {name or 'command'}: exit code {code}\n{''.join(lines)}")
    except OSError as error:
        logging.getLogger("jackfield").warning("the output of %s cannot be written to %s: %s", name, log, error)
