"""A store that notes which process puts and gets which values, and processes that note their messages."""

from __future__ import annotations

import json
import os
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import attrs
import msgspec

#: A backend, installed beside the others, that notes which process puts and gets which values.
COUNTING = {
    "counting_store/__init__.py": "",
    "counting_store/transfer_queue.toml": """
        name = "counting"
        kind = "transfer_queue"
        abi = "1.0"
        object = "counting_store.backend:CountingBackend"
        config = "jackfield_transport_zmq.config:QueueConfig"
        description = "Notes each put and get of zmq"

        [capabilities]
        joins = "full"
    """,
    "counting_store/backend.py": """
        import json, os
        from pathlib import Path
        from jackfield.sdk.cells import split
        from jackfield_transport_zmq.backend import ZMQBackend

        class CountingBackend(ZMQBackend):
            async def put(self, request):
                result = await super().put(request)
                self._note("put", request.keys, request.columns)
                return result

            async def get(self, request):
                result = await super().get(request)
                self._note("get", request.keys, result.columns)
                return result

            def _note(self, call, keys, columns):
                with Path(self.context.folder).with_name(f"calls-{os.getpid()}.jsonl").open("a") as file:
                    for name, column in columns.items():
                        for key, content in zip(keys, split(column)[1], strict=True):
                            file.write(json.dumps([call, key, name, bytes(content).hex()]) + "\\n")
    """,
    "counting_store-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: counting-store\nVersion: 1.0\n",
    "counting_store-1.0.dist-info/entry_points.txt": """
        [jackfield.transfer_queues]
        counting = counting_store:transfer_queue.toml
    """,
}
#: ``jackfield``, which writes all that it sends to and hears from other processes into a file.
DRIVER = """
import sys
from jackfield.cli import main
from jackfield.sdk.rpc.connection import Connection

traffic, received, made = open(sys.argv[1], "wb"), Connection.data_received, Connection.connection_made

class Transport:
    def __init__(self, transport):
        self._transport = transport

    def write(self, data):
        traffic.write(data)
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)

def data_received(self, data):
    traffic.write(data)
    received(self, data)

Connection.data_received = data_received
Connection.connection_made = lambda self, transport: made(self, Transport(transport))
try:
    main(sys.argv[2:])
finally:
    traffic.close()
    assert "ray" not in sys.modules or "torch" not in sys.modules
"""


@attrs.frozen
class Call:
    """A value that a process has put or got."""

    worker: str
    call: str
    key: str
    column: str
    content: bytes


@attrs.frozen
class Seen:
    """What a run's processes put and got, and what its controller sent and heard."""

    calls: list[Call]
    traffic: bytes

    def of(self, worker: str, call: str, *columns: str) -> Counter[tuple[str, str]]:
        """How often a worker has put or got each value, by key and column."""
        return Counter(
            (each.key, each.column)
            for each in self.calls
            if (each.worker, each.call) == (worker, call) and (not columns or each.column in columns)
        )


def install(folder: Path) -> dict[str, str]:
    """Install the backend into a folder; return the environment of processes that have it."""
    for name, text in COUNTING.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(dedent(text).lstrip())
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    return {"PYTHONPATH": os.pathsep.join([str(folder / "site"), *paths])}


def command(traffic: Path, *words: str) -> list[str]:
    """Return the command of a process that notes its messages in a file."""
    return [sys.executable, "-c", DRIVER, str(traffic), *words]


def read(folder: Path, traffic: Path, names: Mapping[int, str]) -> Seen:
    """Return what the processes of a run in a folder have noted; ``names`` are theirs by id."""
    calls = [
        Call(names.get(pid, "the controller"), call, key, column, bytes.fromhex(content))
        for file in folder.glob("calls-*.jsonl")
        for pid in [int(file.stem.removeprefix("calls-"))]
        for call, key, column, content in map(json.loads, file.read_text().splitlines())
    ]
    return Seen(calls, traffic.read_bytes())


def check_traffic(seen: Seen, columns: tuple[str, ...], samples: int) -> None:
    """No value of these columns was in a message, neither as bytes nor as numbers; the names of groups were."""
    looked: dict[str, int] = defaultdict(int)
    for each in seen.calls:
        if each.call == "put" and each.column in columns:
            for form in forms(each):
                assert form not in seen.traffic, each
            looked[each.column] += 1
            assert each.key.rsplit("/", 2)[0].encode() in seen.traffic, "the names of its group are"
    assert dict.fromkeys(columns, samples) == looked


def forms(value: Call) -> Iterator[bytes]:
    """The bytes of a value, and those of its numbers in a message, without the head of their list."""
    yield value.content
    size, kind = (8, "q") if value.column == "prompt_ids" else (4, "f")
    numbers: list[Any] = list(struct.unpack(f"<{len(value.content) // size}{kind}", value.content))
    yield b"".join(map(msgspec.msgpack.encode, numbers))
