"""Values of a run in a Ray cluster go straight from the workers that make them to those that need them, once each."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import attrs
import msgspec
import pytest

pytest.importorskip("ray")

from .conftest import QUICKSTART
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(600)

STEPS, GROUPS, RUNS = 2, 4, 4
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
#: ``jackfield run``, which writes all that it sends to and hears from other processes into a file.
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
    main(["run", *sys.argv[2:]])
finally:
    traffic.close()
    assert "torch" not in sys.modules
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
    """What a run's processes put and got, and what the controller sent and heard."""

    calls: list[Call]
    traffic: bytes

    def of(self, worker: str, call: str, *columns: str) -> Counter[tuple[str, str]]:
        """How often a worker has put or got each value, by key and column."""
        return Counter(
            (each.key, each.column)
            for each in self.calls
            if (each.worker, each.call) == (worker, call) and (not columns or each.column in columns)
        )


@pytest.fixture(scope="module")
def seen(made: Path, tmp_path_factory: pytest.TempPathFactory, ray_environment: dict[str, str]) -> Seen:
    """Two ranks and two epochs. Nothing is shown, and no checkpoint is written."""
    folder = tmp_path_factory.mktemp("values")
    for name, text in COUNTING.items():
        (folder / "site" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "site" / name).write_text(dedent(text).lstrip())
    settings = [
        f"folder={folder / 'run'}", f"model.path={made / 'model'}", f"data.train={made / 'problems'}.jsonl",
        f"data.groups_per_batch={GROUPS}", f"data.rollouts_per_group={RUNS}", "sampling.max_new_tokens=8",
        f"schedule.steps={STEPS}", "evaluation.every=0", "observe.progress=false", "observe.curve=false",
        "observe.tensorboard=false", "observe.samples_per_step=0", "checkpoint={every: 0, at_end: false}",
        "algorithm.old_log_probs=engine", "algorithm.epochs=2", "transfer_queue={name: counting, shared_from_bytes: 1}",
        "cluster={name: ray, threads: 1, ray: {num_cpus: 3, engine_ranks: 2, object_store_bytes: 200000000}}",
        *GRADED,
    ]  # fmt: skip
    environment = {**ray_environment, "PYTHONPATH": os.pathsep.join([str(folder / "site"), *_paths()])}
    command = [sys.executable, "-c", DRIVER, str(folder / "traffic"), str(QUICKSTART / "grpo.yaml"), *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert 0 == done.returncode, done.stderr[-3000:]
    workers = json.loads((folder / "run" / "workers.json").read_text())
    names = {worker["pid"]: name for name, worker in workers.items()}
    calls = [
        Call(names.get(pid, "the controller"), call, key, column, bytes.fromhex(content))
        for file in (folder / "run").glob("calls-*.jsonl")
        for pid in [int(file.stem.removeprefix("calls-"))]
        for call, key, column, content in map(json.loads, file.read_text().splitlines())
    ]
    return Seen(calls, (folder / "traffic").read_bytes())


def _paths() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def test_the_controller_and_the_driver_carry_no_values(seen: Seen) -> None:
    """They put and get nothing, and no value is in a message to or from them, neither as bytes nor as numbers."""
    assert {"the actor engine, rank 0", "the actor engine, rank 1", "agent worker 0", "reward worker 0"} == {
        each.worker for each in seen.calls
    }
    looked: dict[str, int] = defaultdict(int)
    for each in seen.calls:
        if each.call == "put" and each.column in ("prompt_ids", "rollout_log_probs", "old_log_probs"):
            for form in forms(each):
                assert form not in seen.traffic, each
            looked[each.column] += 1
            assert each.key.rsplit("/", 2)[0].encode() in seen.traffic, "the names of its group are"
    assert {GROUPS * RUNS * STEPS} == set(looked.values())
    assert 3 == len(looked)


def forms(value: Call) -> Iterator[bytes]:
    """The bytes of a value, and those of its numbers in a message, without the head of their list."""
    yield value.content
    size, kind = (8, "q") if value.column == "prompt_ids" else (4, "f")
    numbers: list[Any] = list(struct.unpack(f"<{len(value.content) // size}{kind}", value.content))
    yield b"".join(map(msgspec.msgpack.encode, numbers))


def test_a_rank_reads_its_own_rows_once_and_not_what_it_wrote(seen: Seen) -> None:
    """Log-probs and two epochs use what was read once. Rank 0 reads for the advantages of all rows, too."""
    read = []
    for rank in ("the actor engine, rank 0", "the actor engine, rank 1"):
        got, put = seen.of(rank, "get"), seen.of(rank, "put")
        assert {1} == set(got.values()), got.most_common(3)
        assert not got.keys() & put.keys()
        read.append({key for key, _ in seen.of(rank, "get", "prompt_ids", "response_ids")})
        assert read[-1] == {key for key, _ in seen.of(rank, "put", "old_log_probs")}
        for column in ("prompt_ids", "response_ids"):
            assert read[-1] == {key for key, _ in seen.of(rank, "get", column)}
    assert not read[0] & read[1]
    assert GROUPS * RUNS * STEPS == len(read[0] | read[1])
    assert {key for key, _ in seen.of("the actor engine, rank 1", "get", "advantages")} == read[1]
    assert not seen.of("the actor engine, rank 0", "get", "advantages"), "the advantage worker is in its process"
