"""The program between a worker and a user's command: it ends with everything that the command has started.

It is run by its path and needs only the standard library. Arguments: the worker's process id, bytes of memory and
seconds of processor time (0: no limit), then the command. It adopts what the command leaves behind, in whatever
session, and kills it when the command ends, on SIGTERM, and when the worker ends. Its exit code is the command's; 127
if there is no such program.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import types
from contextlib import suppress

if __name__ != "jackfield_user_code._command":  # run by its path: import its neighbour without the package
    _package = types.ModuleType("jackfield_user_code")
    _package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["jackfield_user_code"] = _package

from jackfield_user_code import _tree

_NOT_FOUND = 127


def main() -> None:
    """Run the command, and end as it ended."""
    worker, memory, cpu = map(int, sys.argv[1:4])
    _tree.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: _end(128 + number))
    _tree.die_with_parent(worker, signal.SIGTERM)
    try:
        process = subprocess.Popen(sys.argv[4:], preexec_fn=lambda: _limit(memory, cpu))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"the command cannot be started: {error}", file=sys.stderr, flush=True)
        _end(_NOT_FOUND)
    code = process.wait()
    _end(code if code >= 0 else 128 - code)


def _limit(memory: int, cpu: int) -> None:
    """Set the limits of the command, in its own process."""
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    if cpu:
        resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))


def _end(code: int) -> None:
    """Kill all descendants and end."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        while found := _tree.descendants(os.getpid()):
            for pid in found:
                with suppress(OSError):  # it has ended, or belongs to another user
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
    except ChildProcessError:
        pass
    os._exit(code)


if __name__ == "__main__":
    main()
