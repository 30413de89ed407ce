"""A rank that does not arrive is named by the others within ``collective_timeout``."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest
import torch.distributed as dist

from jackfield.errors import EngineError
from jackfield_commands import CommandServer
from jackfield_engine_fsdp.presence import Presence
from jackfield_ranks import VARIABLES

PATIENCE = 120.0  # for a rank to start, and for each answer
SECONDS = 8.0  # collective_timeout of both ranks, which also have to start within it of each other
Rows = list[dict[str, list[Any]]]


@contextmanager
def two_ranks(
    jackfield: CommandServer, folder: Path, settings: dict[str, Any]
) -> Iterator[list[tuple[IO[str], IO[str]]]]:
    """What both processes say and read, after their first pass; killed at the end, frozen or not."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        server.settimeout(PATIENCE)
        for rank in (0, 1):
            path = folder / f"settings_{rank}.json"
            given = {"rank": rank, "out": str(folder), "port": server.getsockname()[1]}
            path.write_text(json.dumps(settings | given))
            worker = str(Path(__file__).with_name("fault_worker.py"))
            command = jackfield.start(worker, str(path), program="python", environment=VARIABLES)
            stack.callback(command.wait)
            stack.callback(command.kill)
        found = {}
        for _ in (0, 1):
            connection = stack.enter_context(server.accept()[0])
            connection.settimeout(PATIENCE)
            streams = [stack.enter_context(connection.makefile(mode)) for mode in ("r", "w")]
            found[heard(streams[0])["rank"]] = (streams[0], streams[1])
        yield [found[0], found[1]]


def heard(stream: IO[str]) -> dict[str, Any]:
    """The next line of a rank."""
    line = stream.readline()
    assert line, "the rank has ended"
    found: dict[str, Any] = json.loads(line)
    return found


@pytest.mark.multiprocess
@pytest.mark.timeout(300)
def test_a_rank_that_freezes_in_a_pass_is_named_in_time(
    model_folder: Path, rows: Rows, jackfield: CommandServer, tmp_path: Path
) -> None:
    """Rank 1 stops itself between forward and backward pass; rank 0 waits for its gradients."""
    settings = {"model": str(model_folder), "rows": rows, "timeout": SECONDS}
    with two_ranks(jackfield, tmp_path, settings) as (waits, freezes):
        started = time.monotonic()
        print("freeze", file=freezes[1], flush=True)
        print("pass", file=waits[1], flush=True)
        said = heard(waits[0])
        took = time.monotonic() - started
        assert "engine.absent" == said["code"]
        assert said["message"].startswith("rank 1 ")
        assert "a pass" in said["found"]
        assert took < SECONDS + 10.0  # the time of the pass itself on a busy machine


def make(rank: int, size: int, store: dist.Store, seconds: float = 0.2) -> Presence:
    return Presence(store, rank, size, seconds)


def test_ranks_that_never_join_are_named() -> None:
    """Of four, two are there."""
    store = dist.HashStore()
    store.set("joined/2", "")
    with pytest.raises(EngineError) as caught:
        make(0, 4, store).join()
    assert "engine.absent" == caught.value.code
    assert "1, 3" in caught.value.message


def test_the_rank_that_does_not_answer_is_named_with_what_it_began_last() -> None:
    """Rank 2 answers the roll call, rank 1 does not."""
    store = dist.HashStore()
    with make(1, 3, store).during("the start of a pass"):
        pass
    store.set("present/2", "")
    with pytest.raises(EngineError) as caught, make(0, 3, store).during("a sum"):
        raise RuntimeError("[gloo/transport/tcp/unbound_buffer.cc] Timed out waiting 200ms for recv operation")
    assert "engine.absent" == caught.value.code
    assert caught.value.message.startswith("rank 1 ")
    assert "the start of a pass" in str(caught.value.found)


def test_a_late_rank_that_answers_is_named_by_what_it_began() -> None:
    """Both answer; rank 1 has begun fewer operations."""
    store = dist.HashStore()
    late, own = make(1, 2, store), make(0, 2, store)
    for presence in (late, own):
        with presence.during("a pass"):
            pass
    store.set("present/1", "")
    with pytest.raises(EngineError) as caught, own.during("a sum"):
        raise dist.DistBackendError("timed out")
    assert caught.value.message.startswith("rank 1 came too late")


def test_other_errors_pass() -> None:
    """An error of a loss function is its own; with one rank nothing is written."""
    presence = make(0, 2, dist.HashStore())
    with pytest.raises(RuntimeError, match="shapes"), presence.during("a pass"):
        raise RuntimeError("shapes do not fit")
    assert presence.operation < timedelta(seconds=0.2)
