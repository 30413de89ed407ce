"""The program of a process that holds one part of a run, in an interpreter of its own.

``python -m jackfield.runtime.process.host FD PARENT`` serves the socket ``FD``, of which only ``PARENT`` has the other
end. When that end closes, however its owner ended, this process ends with all that it has started.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

from jackfield.abc.rollout import BaseRolloutServer, RolloutContext
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded
from jackfield.imports import own_process
from jackfield.plugins.interpreters import introduce
from jackfield.plugins.registry import load_plugin
from jackfield.rpc import Connection, Contract, Service

_STOP_SECONDS = 10.0  #: for the server to end what it has started, when its owner is gone


class Host:
    """Makes the part that it is asked for, and serves it beside itself."""

    def __init__(self) -> None:
        self.services = {"host": Service(target=self, contract=HOST)}

    async def introduce(self, kind: str, name: str) -> dict[str, Any]:
        """Say which installation and which plugin this interpreter has."""
        return introduce(kind, name)

    async def make(self, name: str, settings: dict[str, Any], context: RolloutContext) -> None:
        """Make a rollout server from its plugin; it is not started."""
        server = load_plugin("rollout", name).build(settings, context, "rollout")
        self.services["worker"] = Service(target=server, contract=ROLLOUT)


HOST, ROLLOUT = Contract(Host), Contract(BaseRolloutServer)


async def _serve(descriptor: int) -> None:
    host = Host()
    connection = Connection("the run", host.services, Clock())
    await asyncio.get_running_loop().create_connection(lambda: connection, sock=socket.socket(fileno=descriptor))
    await connection.lost
    await connection.close()
    if "worker" in host.services:
        with suppress(DeadlineExceeded):
            await Clock().wait_for(host.services["worker"].target.stop(), _STOP_SECONDS, "the server to stop")


def _end_with(parent: int, descriptor: int) -> None:
    """Kill this process group some seconds after the parent is gone, whatever the event loop is doing."""
    poller = select.poll()
    poller.register(descriptor, getattr(select, "POLLRDHUP", select.POLLHUP))
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            poller.register(os.pidfd_open(parent), select.POLLIN)
    poller.poll()
    time.sleep(_STOP_SECONDS + 5.0)
    os.killpg(0, signal.SIGKILL)


def main(descriptor: int, parent: int) -> None:
    """Serve until the parent's end of the socket closes."""
    own_process()
    os.set_inheritable(descriptor, False)
    watch = threading.Thread(target=_end_with, args=(parent, os.dup(descriptor)), name="jackfield-parent", daemon=True)
    watch.start()
    asyncio.run(_serve(descriptor))
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getppid() != parent:  # no process is there to end what the part may have left
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
