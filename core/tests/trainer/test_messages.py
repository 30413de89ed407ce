"""The number of messages between the controller and its workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import attrs
import pytest

from jackfield.clock import Clock
from jackfield.compose.workers import CONTRACTS
from jackfield.sdk.rpc import Server, Service, connect, stub
from jackfield.sdk.rpc.connection import Connection
from jackfield.sdk.rpc.wire import Goodbye, Heartbeat, Hello, Message, Welcome
from jackfield.trainer.role import Schedule

from .simulation import Simulation, Worker

SECONDS = 50.0


class RealClock(Clock):
    """A clock for workers that are reached over sockets."""

    now = 0.0

    def run(self, main: Any) -> Any:
        return asyncio.run(main)


@attrs.define(eq=False, slots=False)
class Distributed(Simulation):
    """A run whose workers are reached over sockets, one connection for each."""

    stack: AsyncExitStack = attrs.field(factory=AsyncExitStack)

    async def _run(self) -> None:
        async with self.stack:
            await super()._run()

    async def reach(self, worker: Worker) -> Worker:
        name, contract = type(worker).__name__, CONTRACTS[type(worker)]
        server = Server(name, {name: Service(target=worker, contract=contract)}, Clock(), SECONDS)
        address = await server.listen()
        self.stack.push_async_callback(server.close)
        connection = await connect(address, "the controller", Clock(), {name: contract})
        self.stack.push_async_callback(connection.close)
        return stub(connection, name, contract, type(worker), SECONDS)


def test_messages_at_the_controller_grow_with_lists_and_not_with_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 2 + 0.2 per group in a step of 128 groups of 8, and at most 8 per group in one of 4 groups."""
    sent = Counter[str]()
    send = Connection.send

    def count(connection: Connection, message: Message) -> None:
        if not isinstance(message, Hello | Welcome | Heartbeat | Goodbye):
            sent[type(message).__name__] += 1
        send(connection, message)

    monkeypatch.setattr(Connection, "send", count)
    steps = 3
    for groups, most in ((4, 8 * 4), (128, 2 + 0.2 * 128)):
        sent.clear()
        times = {"generate_seconds": 0.0, "update_seconds": 0.0, "sync_seconds": 0.0}
        schedule = Schedule(steps=steps, sync_interval=1, sync_offset=0)
        made = Distributed(schedule=schedule, groups=groups, runs=8, clock=RealClock(), **times).run()  # type: ignore[arg-type]
        assert steps * groups * 8 == sum(len(batch) for batch, _ in made.actor.updates)
        assert sum(sent.values()) <= steps * most, dict(sent)
