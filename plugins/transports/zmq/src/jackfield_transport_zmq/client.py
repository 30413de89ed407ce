"""A process's connections to all units of a queue, and its own shared memory."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import zmq

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield_transport_zmq.arenas import Arenas, Block
from jackfield_transport_zmq.config import QueueConfig
from jackfield_transport_zmq.directory import Directory, UnitAddress
from jackfield_transport_zmq.line import Line, Lost, Stale
from jackfield_transport_zmq.values import Lease
from jackfield_transport_zmq.wire import Buffer, Message


async def all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all, also when one fails; then raise the first failure."""
    first, *others = [*calls] or [asyncio.sleep(0)]
    if not others:
        await first
        return
    for result in await asyncio.gather(first, *others, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


@attrs.define(eq=False)
class _Sent:
    """A block of this process that units may need."""

    block: Block
    units: set[int] = attrs.field(factory=set)
    sending: bool = True


class Client:
    """The connections to all units, for one event loop."""

    def __init__(self, directory: Directory, settings: QueueConfig, died: Callable[[UnitAddress], None]) -> None:
        """The directory is kept up to date; ``died`` is called when a unit's death is noticed."""
        self.directory = directory
        self._settings = settings
        self._died = died
        self._clock = Clock()
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context[Any]()
        self._arenas = Arenas(settings.shared_max_bytes)
        self._sent: dict[tuple[int, int], _Sent] = {}
        self._given_back: deque[tuple[int, int]] = deque()  #: leases, from any thread
        self._room: set[asyncio.Future[None]] = set()
        self._lines: dict[int, Line] = {}
        self.added(())

    @property
    def shares(self) -> bool:
        """Return whether all units can open this process's memory."""
        return all(line.shares for line in self._lines.values())

    def added(self, entries: Iterable[Sequence[Any]]) -> None:
        """Add new units."""
        self.directory.add(entries)
        for unit in self.directory.units:
            if unit.number not in self._lines and unit.number not in self.directory.lost:
                settings, heard = self._settings, self._heard
                self._lines[unit.number] = Line(self._context, unit, self.directory, settings, heard, self._lost)

    def _lost(self, unit: UnitAddress) -> None:
        if unit.number in self.directory.lost:
            return
        self.directory.lost.add(unit.number)
        line = self._lines.pop(unit.number, None)
        if line is not None:
            line.close(Lost())
        for sent in list(self._sent.values()):
            self._freed(unit.number, sent.block.name)
        self._died(unit)

    def _heard(self, unit: UnitAddress, message: Message) -> None:
        if message.kind == "freed":
            for inode, start in message["blocks"]:
                self._freed(unit.number, (inode, start))
            return
        for number in message["lost"]:
            for other in self.directory.units:
                if other.number == number:
                    self._lost(other)

    def notice_death(self, unit: int) -> bool:
        """Return whether a unit has died whose death was not noticed before."""
        line = self._lines.get(unit)
        return line is None or line.notice_death()

    def places(self, partition: str, keys: Iterable[str]) -> dict[str, list[int]]:
        """Return the units where each row may be, the unit for new rows first."""
        places = self.directory.places
        if len(self.directory.units) == 1:
            return dict.fromkeys(keys, places(partition, ""))
        return {key: places(partition, key) for key in keys}

    def living(self) -> list[int]:
        """The numbers of the units that live."""
        return sorted(self._lines)

    def nobody_left(self) -> QueueError:
        """Return the error for a queue without living units."""
        return QueueError(
            f"all {len(self.directory.units)} storage units of the queue have died",
            code="queue.unreachable",
            fix="restart the run: it goes on from its newest checkpoint",
        )

    async def homes(self, partition: str, keys: Sequence[str], known: int) -> dict[int, list[int]]:
        """Return the rows of each unit, planned with ``known`` units; existing rows stay in their unit.

        Raises:
            Stale: If there are more units.
            QueueError: ``queue.unreachable`` if no unit is left.
        """
        if len(self.directory.units) == 1 and not self.directory.lost:
            return {0: [*range(len(keys))]} if keys else {}
        places = self.places(partition, keys)
        homes = {key: units[0] for key, units in places.items() if units}
        if len(homes) < len(places):
            raise self.nobody_left()
        asked: defaultdict[int, list[str]] = defaultdict(list)
        for key, units in places.items():
            for unit in units[1:]:
                asked[unit].append(key)

        async def look(unit: int, some: list[str]) -> None:
            with suppress(Lost):
                reply = await self.ask(unit, "has", {"units": known, "partition": partition, "keys": some})
                homes.update((some[number], unit) for number in reply["known"])

        if asked:
            await all_of(look(unit, some) for unit, some in asked.items())
        found: defaultdict[int, list[int]] = defaultdict(list)
        for number, key in enumerate(keys):
            found[homes[key]].append(number)
        return found

    async def ask(
        self,
        unit: int,
        kind: str,
        fields: Mapping[str, Any],
        buffers: Sequence[Buffer] = (),
        block: Block | None = None,
    ) -> Message:
        """Send one request to one unit; ``block`` is the shared memory that it refers to.

        Raises:
            Lost: If the unit is dead.
            Stale: If there are more units than the request was planned with; they are added now.
            QueueError: see :meth:`Line.ask`.
        """
        self._release()
        line = self._lines.get(unit)
        if line is None:
            raise Lost
        refused = None
        if block is not None:
            sent = self._sent[block.name]
            sent.units.add(unit)
            refused = lambda: self._freed(unit, block.name)  # noqa: E731
        try:
            return await line.ask(kind, fields, buffers, refused)
        except Stale as news:
            self.added(news.units)
            raise

    async def ask_all(self, kind: str, fields: Mapping[str, Any]) -> dict[int, Message]:
        """Send one request to all units that live, and return their answers."""
        replies: dict[int, Message] = {}

        async def ask(unit: int) -> None:
            with suppress(Lost):
                replies[unit] = await self.ask(unit, kind, fields)

        await all_of(ask(unit) for unit in self.living())
        return replies

    def tell_all(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Send one message to all units that live."""
        for line in self._lines.values():
            line.tell(kind, fields)

    def lease(self, unit: int, number: int) -> Lease:
        """Return the lease on what a unit shows this process; it is given back from any thread."""

        def give_back() -> None:
            self._given_back.append((unit, number))
            with suppress(RuntimeError):  # the loop has ended, and the units with it
                self._loop.call_soon_threadsafe(self._release)

        return Lease(give_back)

    def _release(self) -> None:
        leases: defaultdict[int, list[int]] = defaultdict(list)
        while self._given_back:
            unit, number = self._given_back.popleft()
            leases[unit].append(number)
        for unit in leases.keys() & self._lines.keys():
            self._lines[unit].tell("release", {"leases": leases[unit]})

    async def room(self, size: int) -> Block:
        """Wait for a block of ``size`` bytes; ``queue.full`` if there is none until the deadline."""
        ends = self._clock.time() + self._settings.seconds
        while (block := self._arenas.take(size)) is None:
            future = self._loop.create_future()
            self._room.add(future)
            try:
                await self._clock.wait_for(future, max(ends - self._clock.time(), 0.0), "room in shared memory")
            except DeadlineExceeded:
                raise QueueError(
                    f"{self._settings.shared_max_bytes} bytes of shared memory stayed full for "
                    f"{self._settings.seconds:g} s",
                    code="queue.full",
                    where="shared_max_bytes",
                    fix="have rows consumed earlier, or raise shared_max_bytes",
                ) from None
            finally:
                self._room.discard(future)
        self._sent[block.name] = _Sent(block)
        return block

    def sent(self, block: Block) -> None:
        """Note that no more units will hear of a block."""
        sent = self._sent.get(block.name)
        if sent is not None:
            sent.sending = False
            self._free_unless_needed(sent)

    def _freed(self, unit: int, name: tuple[int, int]) -> None:
        sent = self._sent.get(name)
        if sent is not None:
            sent.units.discard(unit)
            self._free_unless_needed(sent)

    def _free_unless_needed(self, sent: _Sent) -> None:
        if sent.sending or sent.units:
            return
        del self._sent[sent.block.name]
        self._arenas.give(sent.block)
        room, self._room = self._room, set()
        for future in room:
            if not future.done():
                future.set_result(None)

    def close(self) -> None:
        """Send a goodbye and close the connections."""
        self._release()
        self.tell_all("bye", {})
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._context.term()
