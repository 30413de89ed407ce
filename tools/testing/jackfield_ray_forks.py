"""An interpreter for Ray workers that have imported torch when they start: each is a fork of one process.

    python = ray_interpreter(server, folder)        # a path for ``cluster.interpreters``

Ray starts a worker as ``PYTHON default_worker.py ARGUMENT ...``. This interpreter hands that over to the forking
process, with its environment, its output and its network namespace, and ends when the worker does; anything else it
leaves to Python. The worker tells Ray the number of its own process, whose session is not that of the run. Ray itself
is imported in the fork: it reads the environment then.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

_SCRIPT = """#!/bin/sh
case "$1" in
*/default_worker.py) exec "{python}" -S -E "{client}" "{socket}" "$@" ;;
*) exec "{python}" "$@" ;;
esac
"""
_FDS = (1, 2)
_NETWORK = "/proc/self/ns/net"
_CLONE_NEWNET = 0x40000000


def write_interpreter(folder: Path, listens: Path) -> Path:
    """Write the interpreter whose workers are forks of the process that listens at a path."""
    script = folder / "python"
    script.write_text(_SCRIPT.format(python=sys.executable, client=__file__, socket=listens))
    script.chmod(0o755)
    return script


def serve(listens: str) -> int:
    """Fork a worker for each connection, until this process is ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(listens)
        server.listen(64)
        print("listens", flush=True)
        while True:
            connection, _ = server.accept()
            with connection:
                if os.fork() == 0:
                    server.close()
                    _work(connection)


def _work(connection: socket.socket) -> None:
    """Be a worker; the connection stays open until the end."""
    code = 1
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        size = int.from_bytes(connection.recv(4, socket.MSG_WAITALL), "big")
        content, descriptors, _, _ = socket.recv_fds(connection, size, len(_FDS) + 1, socket.MSG_WAITALL)
        content += connection.recv(size - len(content), socket.MSG_WAITALL) if len(content) < size else b""
        given = json.loads(content)
        _enter_network(descriptors.pop())
        for descriptor, number in zip(descriptors, _FDS, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)
        os.chdir(given["folder"])
        os.environ.clear()
        os.environ.update(given["environment"])
        paths = given["environment"].get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [os.path.dirname(given["arguments"][0]), *filter(None, paths)]
        sys.argv = given["arguments"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def _enter_network(namespace: int) -> None:
    """Have the network of the process that asks, which may be another one than that of the forking process."""
    if os.stat(namespace) != os.stat(_NETWORK) and ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.close(namespace)


def _ask(listens: str, arguments: list[str]) -> None:
    """Hand a worker over, and wait for its end."""
    given = {"arguments": arguments, "environment": dict(os.environ), "folder": os.getcwd()}
    content = json.dumps(given).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(listens)
        connection.sendall(len(content).to_bytes(4, "big"))
        network = os.open(_NETWORK, os.O_RDONLY)
        sent = socket.send_fds(connection, [content], [*_FDS, network])
        connection.sendall(content[sent:])
        connection.recv(1)


if __name__ == "__main__":
    _ask(sys.argv[1], sys.argv[2:])
