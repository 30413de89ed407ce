"""The servers that tests start do not outlive whoever started them."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TESTING = Path(__file__).parents[2] / "tools" / "testing"

_STARTS = """
import sys, time
sys.path.insert(0, sys.argv[1])
import jackfield_servers
server = getattr(jackfield_servers, sys.argv[2])()
server.start()
print(*server._processes(), flush=True)
print(server.folder, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("PostgresServer", marks=pytest.mark.needs("postgres")),
        pytest.param("RedisServer", marks=pytest.mark.needs("redis")),
    ],
)
def test_a_server_dies_with_the_process_that_started_it(kind: str) -> None:
    """By ``kill -9``, with all its processes."""
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTS, str(TESTING), kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert starter.stdout is not None
    with starter:
        processes = [int(process) for process in starter.stdout.readline().split()]
        folder = starter.stdout.readline().strip()
        watched = [os.pidfd_open(process) for process in processes]
        try:
            starter.send_signal(signal.SIGKILL)
            alive = [number for number in watched if not select.select([number], [], [], 20.0)[0]]
        finally:
            for number in watched:
                os.close(number)
            subprocess.run(["rm", "-rf", folder], check=True)
    assert [] == alive
    assert watched
