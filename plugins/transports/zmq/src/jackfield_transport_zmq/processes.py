"""Units as child processes, of who owns the queue."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import attrs

from jackfield.errors import QueueError
from jackfield_transport_zmq.directory import Directory, UnitAddress

_START_SECONDS = 30.0


@attrs.define(eq=False)
class UnitProcess:
    """One child process."""

    process: subprocess.Popen[bytes]
    unit: UnitAddress | None = None

    @classmethod
    def begin(cls, number: int, host: str, directory: Directory) -> UnitProcess:
        """Start it; it comes up by itself."""
        command = [sys.executable, "-m", "jackfield_transport_zmq.serve"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        order = {
            "number": number,
            "owner": os.getpid(),
            "host": host,
            "secret": directory.secret.hex(),
            "keys": None if directory.keys is None else attrs.asdict(directory.keys),
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.close()
        return cls(process)

    def answer(self, number: int, until: float) -> UnitAddress:
        """Wait for its address.

        Raises:
            QueueError: ``queue.store`` where it did not come up.
        """
        assert self.process.stdout is not None
        with self.process.stdout as output:
            ready, _, _ = select.select([output], [], [], max(until - time.monotonic(), 0.0))
            line = output.readline() if ready else b""
        if not line:
            raise QueueError(
                f"storage unit {number} did not start within {_START_SECONDS:g} s",
                code="queue.store",
                where=f"process {self.process.pid}",
                found=f"exit status {self.process.poll()}",
                fix="its standard error says why",
            )
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise QueueError(said["error"], code="queue.store", where=said["where"], fix=said["fix"])
        self.unit = UnitAddress(number, self.process.pid, said["address"], said["place"])
        return self.unit

    def end(self) -> None:
        """End it: it has nothing that it would have to save."""
        self.process.kill()
        self.process.wait()


def started(numbers: Sequence[int], host: str, directory: Directory) -> list[UnitProcess]:
    """Units of these numbers, side by side. Blocks.

    Raises:
        QueueError: one did not start; then none runs.
    """
    children: list[UnitProcess] = []
    try:
        children.extend(UnitProcess.begin(number, host, directory) for number in numbers)
        until = time.monotonic() + _START_SECONDS
        for number, child in zip(numbers, children, strict=True):
            child.answer(number, until)
    except BaseException:
        for child in children:
            child.end()
        raise
    return children
