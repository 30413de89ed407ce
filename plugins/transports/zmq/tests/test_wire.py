"""What comes off a wire is a message that was checked, or a coded error that was counted, whatever comes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import RpcError
from jackfield_transport_zmq.wire import VERSION, Buffer, Limits, Message, Wire, packed, unpacked

pack = msgspec.msgpack.encode

SECRET = b"a secret of this test"
MESSAGES: dict[str, dict[str, Any]] = {
    "put": {"id": int, "keys": list[str], "cells": list[tuple[str, list[int], int]], "names": dict[str, int]},
    "said": {"name": str, "flag": bool, "score": float, "raw": bytes},
    "nothing": {},
}
FIELDS: dict[str, dict[str, Any]] = {
    "put": {"id": 7, "keys": ["a", "ä"], "cells": [("int64", [3, 2], -1), ("bool", [], 0)], "names": {"x": 1}},
    "said": {"name": "n", "flag": True, "score": 0.5, "raw": b"\x00\xff"},
    "nothing": {},
}
MUTATIONS = 100_000


@pytest.fixture
def wire() -> Wire:
    return Wire(MESSAGES, SECRET, Limits(head_bytes=4096, buffers=4, total_bytes=1 << 20))


def signed(body: bytes, secret: bytes = SECRET, version: int = VERSION) -> bytes:
    """A head by somebody who knows the secret."""
    return b"JKF" + bytes([version]) + blake2b(body, digest_size=16, key=secret).digest() + body


def refused(wire: Wire, frames: list[Any]) -> str:
    """The code with which these frames are refused; it is counted once."""
    before = wire.refused.copy()
    with pytest.raises(RpcError) as caught:
        wire.decode(frames)
    assert Counter([caught.value.code]) == wire.refused - before
    return caught.value.code


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_message_comes_back_and_its_buffers_are_not_copied(wire: Wire, kind: str) -> None:
    values = np.arange(1000, dtype=np.int64)
    buffers: list[Buffer] = [values.data.cast("B"), b"text", bytearray(b"")]
    frames = wire.encode(kind, FIELDS[kind], buffers)
    assert all(frame is buffer for frame, buffer in zip(frames[1:], buffers, strict=True))
    found = wire.decode(frames)
    assert (kind, FIELDS[kind]) == (found.kind, found.fields)
    assert all(frame is buffer for frame, buffer in zip(found.buffers, buffers, strict=True))
    assert not wire.refused


@pytest.mark.parametrize(
    ("code", "spoil"),
    [
        pytest.param("rpc.malformed", lambda frames: [], id="no_frames"),
        pytest.param("rpc.malformed", lambda frames: [b""], id="empty_head"),
        pytest.param(
            "rpc.malformed", lambda frames: [b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"], id="another_protocol"
        ),
        pytest.param("rpc.malformed", lambda frames: [frames[0][:10], *frames[1:]], id="cut_in_the_prefix"),
        pytest.param("rpc.version", lambda frames: [b"JKF\x09" + frames[0][4:], *frames[1:]], id="another_version"),
        pytest.param("rpc.authentication", lambda frames: [frames[0][:-1], *frames[1:]], id="cut_head"),
        pytest.param(
            "rpc.authentication", lambda frames: [signed(frames[0][20:], b"a guess"), *frames[1:]], id="wrong_secret"
        ),
        pytest.param("rpc.malformed", lambda frames: frames[:-1], id="missing_buffer"),
        pytest.param("rpc.malformed", lambda frames: [frames[0], b"short"], id="shorter_buffer"),
        pytest.param("rpc.malformed", lambda frames: [*frames, b"more"], id="one_more_buffer"),
        pytest.param("rpc.size", lambda frames: [frames[0], *[b""] * 5], id="too_many_buffers"),
        pytest.param("rpc.size", lambda frames: [frames[0], bytes(1 << 21)], id="too_large_buffer"),
        pytest.param("rpc.size", lambda frames: [frames[0] + bytes(5000)], id="too_large_head"),
        pytest.param("rpc.malformed", lambda _: [signed(pack(["unknown", {}, []]))], id="unknown_kind"),
        pytest.param("rpc.malformed", lambda _: [signed(pack([["put"], {}, []]))], id="kind_of_another_type"),
        pytest.param("rpc.malformed", lambda _: [signed(pack(["nothing", [], []]))], id="fields_in_a_list"),
        pytest.param(
            "rpc.malformed",
            lambda _: [signed(pack(["nothing", {"more": 1}, []]))],
            id="one_more_field",
        ),
        pytest.param("rpc.malformed", lambda _: [signed(pack(["nothing", {}, [], 1]))], id="one_more_item"),
        pytest.param("rpc.malformed", lambda _: [signed(pack({"nothing": 1}))], id="no_list"),
        pytest.param(
            "rpc.malformed",
            lambda _: [signed(pack(["nothing", {}, msgspec.msgpack.Ext(1, b"x")]))],
            id="extension_type",
        ),
        pytest.param(
            "rpc.malformed",
            lambda _: [signed(pack(["nothing", {}, []]) + b"\x00")],
            id="bytes_after_the_end",
        ),
        pytest.param(
            "rpc.malformed", lambda _: [signed(b"\x91" * 2000)], id="endless_nesting"
        ),  # deeper than anybody's stack
        pytest.param(
            "rpc.malformed", lambda _: [signed(b"\x93\xa7nothing\x80" + b"\x91" * 900 + b"\x90")], id="deep_nesting"
        ),
        pytest.param(
            "rpc.malformed", lambda _: [signed(b"\xdd\xff\xff\xff\xff")], id="length_without_content"
        ),  # four thousand million items, it says
    ],
)
def test_what_is_refused(wire: Wire, code: str, spoil: Callable[[list[Any]], list[Any]]) -> None:
    assert code == refused(wire, spoil(wire.encode("put", FIELDS["put"], [b"some bytes"])))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("put", "id", True),
        ("put", "id", 1.0),
        ("put", "keys", ["a", 1]),
        ("put", "keys", "ab"),
        ("put", "cells", [["int64", [3]]]),
        ("put", "cells", [["int64", ["3"], 1]]),
        ("put", "names", {"x": "1"}),
        ("put", "names", [1]),
        ("said", "raw", "text"),
        ("said", "score", None),
    ],
)
def test_a_field_of_another_type_is_named(wire: Wire, kind: str, name: str, value: Any) -> None:
    with pytest.raises(RpcError) as caught:
        wire.decode(wire.encode(kind, FIELDS[kind] | {name: value}))
    assert ("rpc.malformed", name) == (caught.value.code, caught.value.where)


def test_a_message_above_the_limits_is_not_written(wire: Wire) -> None:
    with pytest.raises(RpcError) as caught:
        wire.encode("nothing", {}, [np.zeros(1 << 18).data])
    assert "rpc.size" == caught.value.code


def check(wire: Wire, frames: list[Any]) -> bool:
    """Whether the frames are taken. Then every field is of its type, else the refusal is counted."""
    count = wire.refused.total()
    try:
        found = wire.decode(frames)
    except RpcError:
        assert count + 1 == wire.refused.total()
        return False
    assert isinstance(found, Message)
    assert MESSAGES[found.kind].keys() == found.fields.keys()
    if found.kind == "put":
        assert type(found["id"]) is int
        assert all(type(key) is str for key in found["keys"])
        assert all(type(size) is int for _, shape, _ in found["cells"] for size in shape)
    return True


@pytest.mark.timeout(120)
def test_a_hundred_thousand_damaged_messages(wire: Wire) -> None:
    """Bytes changed, cut, doubled and put elsewhere; half of them by somebody who knows the secret, and signs."""
    rng, taken = random.Random(5), Counter[bool]()
    valid = [wire.encode(kind, fields, [b"ab", b""]) for kind, fields in FIELDS.items()]
    for number in range(MUTATIONS):
        frames = list(rng.choice(valid))
        inside = number % 2 == 0
        damaged = bytearray(frames[0][20:] if inside else frames[0])
        for _ in range(rng.choice((1, 1, 2, 8))):
            place = rng.randrange(len(damaged)) if damaged else 0
            match rng.randrange(5):
                case 0 | 1:
                    damaged[place : place + 1] = rng.randbytes(1)
                case 2:
                    del damaged[place : place + rng.randrange(1, 9)]
                case 3:
                    damaged[place:place] = damaged[: rng.randrange(9)]
                case 4 if len(frames) > 1:
                    frames[rng.randrange(1, len(frames))] = rng.randbytes(rng.randrange(4))
        frames[0] = signed(bytes(damaged)) if inside else bytes(damaged)
        taken[check(wire, frames)] += 1
    assert taken[False] > MUTATIONS // 2
    assert taken[True] > 100  # a changed letter of a key is a message, too
    assert {"rpc.malformed", "rpc.version", "rpc.authentication", "rpc.size"} >= set(wire.refused)
    assert all(wire.refused[code] > 100 for code in ("rpc.malformed", "rpc.version", "rpc.authentication"))


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, database=None)
@given(
    st.binary(max_size=200) | plain.map(pack),
    st.lists(st.binary(max_size=20), max_size=6),
    st.booleans(),
)
def test_anything_at_all(body: bytes, buffers: list[bytes], inside: bool) -> None:
    check(Wire(MESSAGES, SECRET), [signed(body) if inside else body, *buffers])


@settings(max_examples=200, deadline=None, database=None)
@given(kind=st.sampled_from(list(MESSAGES)), name=st.sampled_from(["id", "keys", "cells", "names", "raw"]), value=plain)
def test_any_value_of_a_field(kind: str, name: str, value: Any) -> None:
    check(Wire(MESSAGES, SECRET), [signed(pack([kind, FIELDS[kind] | {name: value}, []]))])


CELLS = st.tuples(st.sampled_from(["a", "b"]), st.integers(-3, 3), st.integers(0, 40), st.integers(0, 40))


@settings(deadline=None, database=None)
@given(st.lists(CELLS, max_size=6))
def test_cells_come_back_from_their_entry(cells: list[tuple[str, int, int, int]]) -> None:
    entry = packed(*(list(items) for items in zip(*cells, strict=True))) if cells else packed([], [], [], [])
    assert cells == list(zip(*unpacked(entry, len(cells), lambda _: (0, 80)), strict=True))


def test_what_cells_share_is_in_their_entry_once() -> None:
    """A put's column goes as one type, source and offset, however many samples there are."""
    offsets, sizes = list(range(7, 8007, 8)), [8] * 1000
    assert (["a"], [-1], [7], [8]) == packed(["a"] * 1000, [-1] * 1000, offsets, sizes)
    assert (["a"], [-1], [*offsets[::-1]], [8]) == packed(["a"] * 1000, [-1] * 1000, offsets[::-1], sizes)
