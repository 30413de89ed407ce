"""What other processes ask of a run that goes on: which replicas it has, and for more or fewer of them.

The controller listens on a loopback port. Where, and the token that whoever asks has to send, is in ``control.json`` in
the run's folder, which only its owner can read. A question is one line of JSON, and so is the answer.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, RunError, error_fields, rebuilt_error
from jackfield.runtime.replicas import Replicas, ReplicaState
from jackfield.settings import structure, unstructure

__all__ = ["ControlServer", "list_replicas", "scale_replicas"]

_FILE = "control.json"
_HOST = "127.0.0.1"
_LINE_BYTES = 1 << 16
_ASK_SECONDS = 10.0  #: for a question to arrive, or a list of replicas to be answered
_ANSWER_SECONDS = 60.0


class ControlServer:
    """The controller's side."""

    def __init__(self, folder: Path, replicas: Replicas, clock: Clock) -> None:
        """
        Args:
            folder: of the run.
            replicas: that are asked for.
            clock: through which every wait goes.
        """
        self._file = folder / _FILE
        self._replicas = replicas
        self._clock = clock
        self._token = secrets.token_hex(32)
        self._server: asyncio.Server | None = None
        self._asked: set[asyncio.Task[None]] = set()

    async def open(self, **told: Any) -> None:
        """Listen, and say where.

        Args:
            told: what else is said there.
        """
        self._server = await asyncio.start_server(self._serve, _HOST, 0, limit=_LINE_BYTES)
        port = self._server.sockets[0].getsockname()[1]
        where = {"host": socket.gethostname(), "pid": os.getpid(), "port": port, "token": self._token, **told}
        self._file.unlink(missing_ok=True)  # of a run that was killed
        with os.fdopen(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(where, file)

    async def close(self) -> None:
        """Listen no more; what is being done for somebody is given up."""
        self._file.unlink(missing_ok=True)
        if self._server is not None:
            self._server.close()
        for task in self._asked:
            task.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one question. What was asked for is done although whoever asked has left."""
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        try:
            line = await self._clock.wait_for(reader.readline(), _ASK_SECONDS, "a question to the run")
            with suppress(ConnectionError):
                writer.write(json.dumps(await self._answer(line)).encode() + b"\n")
                await self._clock.wait_for(writer.drain(), _ASK_SECONDS, "an answer of the run to be read")
        except (DeadlineExceeded, ValueError, ConnectionError):
            return  # whoever it is does not speak our language
        finally:
            self._asked.discard(task)
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            question = json.loads(line)
            token, count = str(question["token"]), question.get("count")
            if not hmac.compare_digest(token.encode(), self._token.encode()) or not isinstance(count, int | None):
                raise ValueError("no question of ours")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            error = RunError("this is no question to the run", code="wire.authentication", where=str(self._file))
            return {"error": error_fields(error)}
        try:
            states = await (self._replicas.states() if count is None else self._replicas.scale(count))
        except Exception as error:  # it is the asker's: the run goes on
            return {"error": error_fields(error)}
        return {"replicas": unstructure(states)}


def list_replicas(folder: Path) -> list[ReplicaState]:
    """The replicas of the run that goes on in ``folder``, in whatever process of this machine.

    Raises:
        RunError: ``run.not-running``: there is none, it has not begun, or nobody generates in it.
        DeadlineExceeded: it does not answer.
    """
    return _ask(Path(folder), _ANSWER_SECONDS, {})


def scale_replicas(folder: Path, count: int, *, seconds: float = 3600.0) -> list[ReplicaState]:
    """Add or remove replicas of the run that goes on in ``folder``, until it has ``count``.

    It returns when all have the engine's weights and serve, or have been ended. Call it in a thread where the run is in
    this process.

    Args:
        folder: of the run.
        count: of replicas.
        seconds: to wait for it; the run goes on with it afterwards.

    Raises:
        RunError: ``run.not-running``; ``runtime.cluster``: there is no room.
        ConfigError: ``count`` is less than 1.
        JackfieldError: why a replica could not be added.
        DeadlineExceeded: it is not done yet.
    """
    return _ask(Path(folder), seconds, {"count": count})


def _ask(folder: Path, seconds: float, question: Mapping[str, Any]) -> list[ReplicaState]:
    where = _where(folder)
    try:
        with socket.create_connection((_HOST, where["port"]), _ASK_SECONDS) as connection:
            connection.sendall(json.dumps({**question, "token": where["token"]}).encode() + b"\n")
            connection.settimeout(seconds)
            with connection.makefile("rb") as file:
                line = file.readline()
    except TimeoutError as error:
        raise DeadlineExceeded(
            f"waited {seconds:g} s for the run in {folder}", fix="ask again; what was asked for is still being done"
        ) from error
    except OSError as error:
        raise _not_running(folder, f"process {where['pid']} does not listen any more") from error
    if not line:
        raise _not_running(folder, "it ended before it answered")
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise _not_running(folder, f"somebody else at port {where['port']}") from error
    if "error" in answer:
        raise rebuilt_error(answer["error"], f"the run in {folder}")
    return [structure(ReplicaState, state) for state in answer["replicas"]]


def _where(folder: Path) -> dict[str, Any]:
    try:
        where: dict[str, Any] = json.loads((folder / _FILE).read_text(encoding="utf-8"))
    except PermissionError as error:
        raise _not_running(folder, f"{_FILE}, which belongs to somebody else") from error
    except (OSError, ValueError) as error:
        raise _not_running(folder, f"no {_FILE} there" if folder.is_dir() else "no such folder") from error
    if where["host"] != socket.gethostname():
        raise _not_running(folder, f"a run on {where['host']}")
    return where


def _not_running(folder: Path, found: str) -> RunError:
    return RunError(
        "no run with replicas goes on in the folder",
        code="run.not-running",
        where=str(folder),
        expected="the folder of a run whose first step is under way, on the machine and by the user of its controller",
        found=found,
    )
