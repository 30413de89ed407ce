"""Whatever comes to a unit: it refuses, counts and goes on."""

from __future__ import annotations

import asyncio
import os
import random
import select
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, get_args, get_origin

import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from zmq.utils.monitor import recv_monitor_message

from jackfield.abc.transfer_queue import GetRequest, PutRequest
from jackfield.sdk.cells import dense_column
from jackfield_testing import in_loop
from jackfield_transport_zmq.arenas import place_of_this_process
from jackfield_transport_zmq.near import SCHEME, Stream, connected
from jackfield_transport_zmq.sockets import dealer, password
from jackfield_transport_zmq.unit import Unit
from jackfield_transport_zmq.wire import REPLIES, REQUESTS, Wire

SECRET = b"of these tests"


async def works(backend: Any) -> None:
    column = dense_column(torch.arange(3.0))
    await backend.put(PutRequest(partition="p", keys=("a", "b", "c"), columns={"x": column}))
    found = await backend.get(GetRequest(partition="p", keys=("c", "a"), columns=("x",)))
    assert [2.0, 0.0] == found.columns["x"].values.tolist()


Send = Callable[[list[Any]], object]
Hear = Callable[[], Sequence[Any]]


@contextmanager
def member(directory: Any, encrypted: bool) -> Iterator[tuple[Send, Hear]]:
    """Somebody with the key or the password, who sends frames and hears an answer."""
    if encrypted:
        with zmq.Context() as context, dealer(context, directory.keys, directory.secret) as remote:
            remote.connect(directory.units[0].address)

            def remote_answer() -> Sequence[Any]:
                assert remote.poll(20_000)
                return remote.recv_multipart()

            yield remote.send_multipart, remote_answer
        return
    waits = [False]
    stream = connected(directory.units[0].address, directory.secret, lambda blocked: waits.append(blocked))

    def send(frames: list[Any]) -> None:
        stream.send(frames)
        while waits[-1]:
            assert select.select([], [stream.socket], [], 20.0)[1]
            stream.flush()

    def hear() -> Sequence[Any]:
        assert select.select([stream.socket], [], [], 20.0)[0]
        return next(stream.receive())

    with stream.socket:
        yield send, hear


@in_loop
@pytest.mark.parametrize("encrypted", [True, False])
async def test_nonsense_of_those_who_got_in_is_refused_and_counted(opened: Any, encrypted: bool) -> None:
    """Noise, other protocols, damaged messages, and good ones signed with another secret."""
    async with opened(encrypted=encrypted) as backend:
        directory = backend._client.directory
        rng = random.Random(3)
        valid = Wire(REQUESTS, directory.secret).encode("has", {"id": 1, "units": 1, "partition": "p", "keys": ["a"]})
        with member(directory, encrypted) as (send, hear):
            send(Wire(REQUESTS, b"a guess").encode("bye", {"early": False}))
            send([b"JKF\x09" + bytes(20)])
            for _ in range(500):
                send([rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 4))])
                damaged = bytearray(valid[0])
                damaged[rng.randrange(20, len(damaged))] ^= rng.randrange(1, 256)
                send([bytes(damaged)])
            send(valid)  # after all of them, and of somebody who knows
            reply = Wire(REPLIES, directory.secret).decode(hear())
            assert ("known", []) == (reply.kind, reply["known"])
        await works(backend)
        details = (await backend.stats()).details
        refused = {name.rpartition(".")[2]: count for name, count in details.items() if "refused rpc" in name}
        assert {"malformed": 500.0, "authentication": 501.0, "version": 1.0} == refused


@in_loop
@pytest.mark.parametrize("mechanism", [True, False])
async def test_strangers_without_the_key_do_not_get_in(opened: Any, mechanism: bool) -> None:
    """Neither without a mechanism nor with a key of their own."""
    async with opened(encrypted=True) as backend:
        directory = backend._client.directory
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            if mechanism:
                stranger.curve_serverkey = directory.keys.server_public.encode()
                stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
            failures = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            failures |= zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_DISCONNECTED
            monitor = stranger.get_monitor_socket(failures)
            stranger.connect(directory.units[0].address)
            assert monitor.poll(20_000)
            assert recv_monitor_message(monitor)["event"] & failures
            stranger.disable_monitor()
            monitor.close()
        await works(backend)
        assert float(mechanism) <= (await backend.stats()).details["unit 0 refused connections"]


async def answer_to(address: str, *contents: bytes) -> bytes:
    """What a unit says to a process of its host that sends this, until it closes the connection."""
    reader, writer = await asyncio.open_unix_connection("\0" + address.removeprefix(SCHEME))
    try:
        for content in contents:
            writer.write(content)
        with suppress(ConnectionError):
            return await asyncio.wait_for(reader.read(), 20)
        return b""
    finally:
        writer.close()


@in_loop
async def test_processes_of_the_host_without_the_password_do_not_get_in(opened: Any) -> None:
    """Nothing of what they send is looked at, and members cannot announce more than a message may have."""
    async with opened() as backend:
        directory = backend._client.directory
        address, shown = directory.units[0].address, password(directory.secret)
        valid = bytes(Wire(REQUESTS, directory.secret).encode("stats", {"id": 1})[0])
        assert b"" == await answer_to(address, b"a guess".ljust(len(shown)), struct.pack("<2Q", 1, len(valid)), valid)
        assert b"" == await answer_to(address, b"GET / HTTP/1.1\r\n\r\n".ljust(len(shown)))
        assert 2.0 == (await backend.stats()).details["unit 0 refused connections"]
        for sizes in ((1, 1 << 40), (1 << 40,), (1 << 16, *[1 << 33] * (1 << 16))):
            assert b"" == await answer_to(address, shown, struct.pack(f"<{len(sizes)}Q", *sizes))
        await works(backend)


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Anything of a field's type, much of it plausible."""
    if get_origin(schema) is list:
        return st.lists(values(get_args(schema)[0]), max_size=3)
    if get_origin(schema) is tuple:
        return st.tuples(*map(values, get_args(schema))).map(list)
    if schema is str:
        return st.sampled_from(["p", "a", "b", "x", "dense", "float32", "m", ""]) | st.text(max_size=3)
    return st.sampled_from([0, 1, -1, -2, 4, 8, os.getpid(), 2**31, -(2**63), 2**63 - 1])


requests = st.sampled_from(list(REQUESTS)).flatmap(
    lambda kind: st.tuples(
        st.just(kind), st.fixed_dictionaries({name: values(schema) for name, schema in REQUESTS[kind].items()})
    )
)


@settings(max_examples=100, deadline=None, database=None)
@given(st.lists(st.tuples(requests, st.lists(st.binary(max_size=9), max_size=3)), max_size=12))
def test_members_that_talk_nonsense_are_answered_and_the_unit_lives(history: Any) -> None:
    """Well signed, every field of its type, and no sense in it: each request is answered at most once."""
    sent: list[Any] = []
    wire = Wire({**REQUESTS, **REPLIES}, SECRET)
    unit = Unit(0, wire, lambda identity, frames: sent.append((identity, frames)), place_of_this_process())
    for (kind, fields), buffers in history:
        unit.receive(b"client", wire.encode(kind, fields, buffers))
    unit._hold_ends = 0.0
    unit.tick()
    replies = [wire.decode(frames) for _, frames in sent]
    assert all(reply.kind in REPLIES for reply in replies)
    assert sum(reply.kind != "freed" for reply in replies) <= len(history)
    assert not wire.refused
    for identity in list(unit.clients):
        unit.gone(identity)


PUT = {"id": 1, "units": 0, "partition": "p", "keys": ["a", "b"], "columns": ["x"], "blocks": []}
TYPE = '["dense","float32",[2]]'
GOOD = [[TYPE], [0], [0, 0], [8]]


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ([[TYPE], [0], [0, 4], [8]], "outside of its message"),
        ([[TYPE], [0], [0], [8]], "outside of its message"),
        ([[TYPE], [0, 3], [0, 0], [8]], "outside of its message"),
        ([[TYPE], [0], [0, -8], [8]], "outside of its message"),
        ([[TYPE], [0], [0, 8], [8, -8]], "outside of its message"),
        ([[TYPE], [0, -1], [0, 0], [8]], "index out of range"),
        ([[TYPE], [0], [0, 0, 0], [8]], "2 rows"),
        ([[], [0], [0, 0], [8]], "2 rows"),
    ],
)
def test_cells_beyond_their_message_are_refused_and_nothing_is_stored(cells: list[Any], message: str) -> None:
    sent: list[Any] = []
    wire = Wire({**REQUESTS, **REPLIES}, SECRET)
    unit = Unit(0, wire, lambda _, frames: sent.append(wire.decode(frames)), "")
    unit.receive(b"client", wire.encode("hello", {"pid": os.getpid(), "place": ""}))
    put = {**PUT, "columns": ["x", "y"], "cells": [GOOD, cells]}
    unit.receive(b"client", wire.encode("put", put, [bytes(8)]))
    assert "refused" == sent[0].kind
    assert message in sent[0]["message"]
    unit.receive(b"client", wire.encode("stats", {"id": 2}))
    assert (0, 0) == (sent[1]["rows"], sent[1]["bytes"])


def test_what_comes_of_a_producer_after_its_death_is_not_stored() -> None:
    """Its rows may have been deleted by then, and nobody would delete them again."""
    sent: list[Any] = []
    wire = Wire({**REQUESTS, **REPLIES}, SECRET)
    unit = Unit(0, wire, lambda _, frames: sent.append(wire.decode(frames)), place_of_this_process())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as producer:
        unit.receive(b"producer", wire.encode("hello", {"pid": producer.pid, "place": place_of_this_process()}))
        unit.receive(b"producer", wire.encode("put", {**PUT, "cells": [GOOD]}, [bytes(8)]))
    late = wire.encode("put", {**PUT, "id": 2, "keys": ["c", "d"], "cells": [GOOD]}, [bytes(8)])
    unit.receive(b"producer", late)
    unit.gone(b"producer")
    unit.receive(b"producer", late)
    unit.receive(b"reader", wire.encode("stats", {"id": 3}))
    assert [1, 3] == [reply.fields["id"] for reply in sent]
    assert 2 == sent[1]["rows"]


@in_loop
async def test_a_frame_that_nobody_could_hold_is_refused_before_it_comes(opened: Any) -> None:
    """A stranger who speaks ZMTP announces a megabyte before it shows a key: the connection is closed."""
    async with opened(encrypted=True) as backend:
        host, _, port = backend._client.directory.units[0].address.removeprefix("tcp://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32))
            assert b"CURVE" in await asyncio.wait_for(reader.readexactly(64), 20)
            writer.write(b"\x06" + (1 << 20).to_bytes(8, "big") + b"abc")
            with suppress(ConnectionError):
                assert b"WELCOME" not in await asyncio.wait_for(reader.read(), 20)
        finally:
            writer.close()
        await works(backend)


class Ends:
    """Both ends of a connection in this process."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.waits = [False]
        self.sender, self.receiver = Stream(ours, self.waits.append), Stream(theirs, self.waits.append)

    def moved(self, messages: list[list[bytes]]) -> list[list[bytes]]:
        """What comes of these messages."""
        for frames in messages:
            self.sender.send(frames)
        found: list[list[bytes]] = []
        while len(found) < len(messages):
            self.sender.flush()
            found += [[bytes(frame) for frame in frames] for frames in self.receiver.receive()]
        return found


def test_messages_of_any_size_come_whole_and_in_order_within_a_host() -> None:
    """Longer ones than the system takes at once, with frames between them that are empty or small."""
    rng = random.Random(4)
    sizes = [[3], [], [0, 0], [1 << 16], [5, 1 << 20, 0, 7, 3 << 20], [1] * 500, [(1 << 16) - 24], [9, 0]]
    messages = [[rng.randbytes(size) for size in each] for each in sizes * 2]
    ends = Ends()
    with ends.sender.socket, ends.receiver.socket:
        assert messages == ends.moved(messages)
        assert not ends.waits[-1]
        assert True in ends.waits
        ends.sender.socket.close()
        assert [] == list(ends.receiver.receive())
        assert ends.receiver.ended
