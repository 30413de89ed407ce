"""The server and the client of a queue whose controller is in another process."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

from jackfield.clock import Clock
from jackfield.errors import QueueError, RpcError
from jackfield.queue.transfer_queue import TransferQueue
from jackfield.rpc import Address, Connection, Contract, Server, Service, caller, connect, stub

_SERVICE, _SERVER = "queue", "the queue's controller"
_LOCAL = {"start", "close", "end_holder"}
QUEUE = Contract(TransferQueue, without=_LOCAL, undo={"lease_batch": "release", "lease_groups": "release"})


class QueueServer(Server):
    """A server of a queue. A client's leases, batches and iterations end with its connection."""

    def __init__(self, queue: TransferQueue, clock: Clock, heartbeat_seconds: float) -> None:
        """Create a server that is not listening. A client without a heartbeat for so long is dead."""
        service = {_SERVICE: Service(target=queue, contract=QUEUE)}
        super().__init__(_SERVER, service, clock, heartbeat_seconds, lambda ended, _: queue.end_holder(ended.session))
        self._queue, self._endings = queue, set[asyncio.Task[None]]()
        queue.caller = lambda: caller().session
        queue.on_reset = self._end_others
        queue.served = lambda: {"clients": len(self.clients), "refused": self.refused}

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen for clients.

        Raises:
            QueueError: ``queue.store`` if the address is in use, or is not an address of this machine.
        """
        try:
            return await super().listen(host, port)
        except RpcError as error:
            raise QueueError(error.message, code="queue.store", where=error.where, fix=error.fix) from error

    def _end_others(self, reason: str, explorers: set[str | None]) -> None:
        """End the clients that used the queue before its state was replaced."""
        for client in list(self.clients.values()):
            begun = client.session in explorers or client.iterates
            if begun and client.session != self._queue.caller():
                task = asyncio.get_running_loop().create_task(client.close(reason))
                self._endings.add(task)
                task.add_done_callback(self._endings.discard)


async def connect_queue(file: Path, name: str, clock: Clock) -> tuple[TransferQueue, Connection]:
    """Connect to a served queue. Waits end at the deadlines of their calls or with the connection.

    ``file`` is the server's address file, ``name`` the name of this process for the server's messages. The caller must
    close the connection that is returned with the queue.

    Raises:
        QueueError: ``queue.unreachable`` if the file is missing; ``queue.session`` if no controller answers.
    """
    try:
        address = Address.read(file)
    except RpcError as error:
        message, fix = "no controller of a queue is served there", "start `jackfield queue serve` first"
        raise QueueError(message, code="queue.unreachable", where=str(file), found=error.found, fix=fix) from error

    def lost(reason: str) -> QueueError:
        message = f"the connection to {_SERVER} is lost: it {reason}"
        fix = "start this process again, once `jackfield queue serve` runs"
        return QueueError(message, code="queue.session", where=str(address.process), fix=fix)

    connection = await connect(address, name, clock, {_SERVICE: QUEUE}, lost_error=lost)
    return stub(connection, _SERVICE, QUEUE, TransferQueue, math.inf), connection
