"""Servers of fixtures: a program on loopback that ends with this process."""

from __future__ import annotations

import atexit
import select
import subprocess
import sys

from jackfield.errors import RunError

_START_SECONDS = 30.0
_END_SECONDS = 5.0


def loopback_server(module: str) -> str:
    """Start ``python -m module`` and return its address, the first line that it prints.

    It has to end when its standard input closes, which it does at the latest when this process ends.
    """
    program = subprocess.Popen(
        [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, close_fds=True
    )
    atexit.register(_end, program)
    assert program.stdout is not None
    ready, _, _ = select.select([program.stdout], [], [], _START_SECONDS)
    line = program.stdout.readline().strip() if ready else ""
    if not line:
        raise RunError(f"the server {module} did not start", where=module, expected="its address", found="nothing")
    return line


def _end(program: subprocess.Popen[str]) -> None:
    if program.stdin is not None:
        program.stdin.close()
    try:
        program.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()
    if program.stdout is not None:
        program.stdout.close()
