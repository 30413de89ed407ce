"""The program of a process that holds one part of a run, in an interpreter of its own.

``python -m jackfield.runtime.process.host FD PARENT PULSE SECONDS``: requests come, and answers go, over the socket
``FD``, of which only ``PARENT`` has the other end; signs of life go over the pipe ``PULSE``. When the other end of the
socket closes, however its owner ended, this process ends with all that it has started.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from jackfield.abc import CONTRACTS
from jackfield.abc.rollout import RolloutContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RunError, error_fields
from jackfield.imports import own_process
from jackfield.plugins.introduction import introduce
from jackfield.plugins.registry import load_plugin
from jackfield.pulse import beat
from jackfield.runtime.process.wire import decode, frame, read, types_of

__all__ = ["Host", "main"]

#: Kinds whose parts can live here, with what they are told at their construction.
_CONTEXTS = {"rollout": RolloutContext}
_STOP_SECONDS = 10.0  #: for the part to end what it has started, when nobody is there any more
_KILL_SECONDS = _STOP_SECONDS + 5.0


class Host:
    """Serves one socket: makes the part that it is told to, and calls its methods, many at a time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._kind = ""
        self._part: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Answer until the other side ends; then stop the part."""
        with suppress(EOFError, OSError):
            while True:
                message = await read(self._reader)
                if "cancel" in message:
                    task = self._tasks.get(message["cancel"])
                    if task is not None:
                        task.cancel()
                    continue
                number = message["number"]
                task = self._tasks[number] = asyncio.create_task(self._answer(number, message))
                task.add_done_callback(partial(self._ended, number))
        await self._end()

    async def _answer(self, number: int, message: Mapping[str, Any]) -> None:
        """One request, to its last answer, unless it is cancelled."""
        answer: dict[str, Any]
        try:
            answer = {"value": await self._do(number, message)}
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # a part may raise anything, SystemExit included
            traceback.print_exc()
            answer = {"error": error_fields(error)}
        self._say({"number": number, **answer})

    def _ended(self, number: int, task: asyncio.Task[None]) -> None:
        del self._tasks[number]
        if task.cancelled():  # perhaps before it began
            self._say({"number": number, "cancelled": True})

    async def _do(self, number: int, message: Mapping[str, Any]) -> Any:
        if "introduce" in message:
            return introduce(**message["introduce"])
        if "make" in message:
            return self._make(**message["make"])
        member, arguments = message["call"], message["arguments"]
        if self._part is None:
            raise RunError("nothing was made in this process", where=member)
        wanted, _ = types_of(CONTRACTS[self._kind], member)
        result = getattr(self._part, member)(*([] if wanted is None else [decode(wanted, arguments)]))
        if inspect.isasyncgen(result) or hasattr(result, "__anext__"):
            try:
                async for value in result:
                    self._say({"number": number, "chunk": value})
                    await self._writer.drain()
            finally:
                if hasattr(result, "aclose"):
                    await result.aclose()
            return None
        return await result

    def _make(self, kind: str, name: str, settings: Mapping[str, Any], context: Mapping[str, Any]) -> None:
        loaded = load_plugin(kind, name)
        self._kind = kind
        self._part = loaded.build(settings, decode(_CONTEXTS[kind], context), kind)

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            data = frame(message)
        except (TypeError, ValueError) as error:
            data = frame({"number": message["number"], "error": error_fields(error)})
        self._writer.write(data)

    async def _end(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        if self._part is not None:
            with suppress(DeadlineExceeded):
                await Clock().wait_for(self._part.stop(), _STOP_SECONDS, "the part of a run that is over to stop")
        self._writer.close()


async def _serve(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
    await Host(reader, writer).serve()


def _end_with(parent: int, descriptor: int) -> None:
    """Kill this process group some seconds after the parent is gone, whatever the event loop is doing."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            poller.register(os.pidfd_open(parent), select.POLLIN)
    poller.poll()
    time.sleep(_KILL_SECONDS)
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int, parent: int, pulse: int, silence_seconds: float) -> None:
    """Serve until the parent's end of the socket closes."""
    beat(pulse, silence_seconds)
    own_process()
    os.set_inheritable(descriptor, False)
    watch = threading.Thread(target=_end_with, args=(parent, os.dup(descriptor)), name="jackfield-parent", daemon=True)
    watch.start()
    asyncio.run(_serve(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != parent:  # nobody is there to end what the part may have left
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    _descriptor, _parent, _pulse = map(int, sys.argv[1:4])
    main(_descriptor, _parent, _pulse, float(sys.argv[4]))
