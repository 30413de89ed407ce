"""A client's connection to one unit: requests with deadlines, and the unit's own messages."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import zmq

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RpcError
from jackfield_transport_zmq.arenas import has_ended, place_of_this_process
from jackfield_transport_zmq.channels import Far, Near, opened
from jackfield_transport_zmq.config import QueueConfig
from jackfield_transport_zmq.directory import Directory, UnitAddress
from jackfield_transport_zmq.wire import REPLIES, Buffer, Message, Wire

_DEATH_MS = 1000  #: from the end of a process's memory to its own


class Lost(Exception):
    """The unit died."""


class Stale(Exception):
    """Units were added; the message has them."""

    def __init__(self, units: Sequence[Any]) -> None:
        super().__init__()
        self.units = units


class Line:
    """A client's connection to one unit, for one event loop."""

    def __init__(
        self,
        context: zmq.Context[Any],
        unit: UnitAddress,
        directory: Directory,
        settings: QueueConfig,
        heard: Callable[[UnitAddress, Message], None],
        lost: Callable[[UnitAddress], None],
    ) -> None:
        """``heard`` is called with every message, before its request is answered; ``lost`` when the unit has ended."""
        self.unit = unit
        place, shares = place_of_this_process(), settings.shared_from_bytes is not None
        near = bool(place) and place == unit.place
        self.shares = shares and near  #: whether we open each other's memory
        self._wire = Wire(REPLIES, directory.secret)
        self._seconds = settings.seconds
        self._heard = heard
        self._lost = lost
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count(1)
        self._asked: dict[int, tuple[asyncio.Future[Message], Callable[[], object] | None]] = {}
        self._process: int | None = None
        self._closed = False
        self._channel: Near | Far | None = None
        try:
            self._channel = opened(context, unit.address, directory, self._received, self._died)
            if near:
                self._watch()
        except (ConnectionError, ProcessLookupError):
            self._loop.call_soon(self._died)
        self.tell("hello", {"pid": os.getpid(), "place": place if shares else ""})

    def _watch(self) -> None:
        self._process = os.pidfd_open(self.unit.pid)
        self._loop.add_reader(self._process, self._died)

    def notice_death(self) -> bool:
        """Return whether the unit has died, where that can be seen; its memory is dropped before ``died`` is called."""
        if self._process is not None and has_ended(self._process, _DEATH_MS):
            self._died()
        return self._closed

    def _died(self) -> None:
        if not self._closed:
            self.close(Lost())
            self._lost(self.unit)

    def tell(self, kind: str, fields: Mapping[str, Any], buffers: Sequence[Buffer] = ()) -> None:
        """Send a message without an answer."""
        if self._channel is not None:
            self._channel.send(self._wire.encode(kind, fields, buffers))

    async def ask(
        self,
        kind: str,
        fields: Mapping[str, Any],
        buffers: Sequence[Buffer] = (),
        refused: Callable[[], object] | None = None,
    ) -> Message:
        """Send a request, whose buffers may not change meanwhile, and wait for the answer.

        ``refused`` is called if the unit does not carry it out, also after the deadline.

        Raises:
            Lost: If the unit died.
            Stale: If the unit knows of more units than the request.
            QueueError: ``queue.unreachable`` at the deadline, naming the unit; or the unit's error.
        """
        if self._closed:
            if refused is not None:
                refused()
            raise Lost
        number = next(self._numbers)
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[number] = future, refused
        self.tell(kind, {"id": number, **fields}, buffers)
        try:
            return await self._clock.wait_for(future, self._seconds, f"{self.unit.name} to answer {kind}")
        except DeadlineExceeded as error:
            raise QueueError(
                str(error.message),
                code="queue.unreachable",
                where=self.unit.name,
                fix="look at why it does not answer, or raise the setting seconds",
            ) from None

    def _received(self, frames: list[Buffer]) -> None:
        with suppress(RpcError):  # counted by the wire
            self._take(self._wire.decode(frames))

    def _take(self, message: Message) -> None:
        self._heard(self.unit, message)
        if "id" not in message.fields:
            return
        future, refused = self._asked.pop(message["id"], (None, None))
        if message.kind in ("refused", "stale") and refused is not None:
            refused()
        if future is None or future.done():
            if message.fields.get("lease"):  # nobody is there any more to read it
                self.tell("release", {"leases": [message["lease"]]})
        elif message.kind == "stale":
            future.set_exception(Stale(message["units"]))
        elif message.kind == "refused":
            future.set_exception(QueueError(message["message"], code="queue.store", where=self.unit.name))
        else:
            future.set_result(message)

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; all waits end with ``reason``."""
        if self._closed:
            return
        self._closed = True
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close(at_once=reason is not None)
        process, self._process = self._process, None
        if process is not None:
            self._loop.remove_reader(process)
            os.close(process)
        asked, self._asked = self._asked, {}
        for future, refused in asked.values():
            if refused is not None:
                refused()
            if not future.done():
                future.set_exception(reason or QueueError("the zmq backend is closed", code="queue.closed"))
                future.exception()  # whoever waits may have gone
