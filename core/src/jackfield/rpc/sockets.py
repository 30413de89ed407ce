"""Servers and clients of the RPC: addresses, authentication, and what happens when an end falls silent.

Within a host a server listens at an abstract Unix address, elsewhere at a TCP port with TLS, whose certificate is in
the address file. Both ends prove that they know the file's secret before anything else is read.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import os
import secrets
import ssl
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError
from jackfield.files import replace_file
from jackfield.rpc.connection import Connection, Service
from jackfield.rpc.contract import Contract
from jackfield.rpc.heartbeat import LOOKS, Process, until_silent
from jackfield.rpc.tls import is_loopback, server_tls
from jackfield.rpc.wire import LIMIT, STRANGER_LIMIT, Heartbeat, Hello, Message, News, Welcome

_STRANGERS = 64  #: connections that have proved nothing yet; further ones are closed at once
_PROOF_SECONDS = 10.0
_ENDED = "has ended"  #: how a client ends that has done its work


@attrs.frozen(kw_only=True)
class Address:
    """Where a server listens, and what a client has to know to connect. Plain values."""

    host: str  #: empty: an abstract Unix address
    port: int | str
    secret: str
    certificate: str = ""  #: PEM; empty: without TLS
    heartbeat_seconds: float
    process: Process

    def write(self, file: Path, **further: str) -> None:
        """Write the address to a file that only this user can read. A process that can read it may call everything.

        Args:
            file: is replaced in one move.
            further: what the file says beside the address.
        """
        replace_file(file, json.dumps({**attrs.asdict(self), **further}), mode=0o600, durable=False)

    @classmethod
    def read(cls, file: Path) -> Address:
        """Read an address that a server has written.

        Raises:
            RpcError: ``rpc.address``: there is none, or it cannot be read.
        """
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, ValueError, TypeError) as error:
            raise RpcError("no server's address is there", code="rpc.address", where=str(file), found=error) from error

    def proof(self, own: bytes, other: bytes) -> bytes:
        """Compute the proof of the secret for the end that sent the nonce ``other``."""
        return hmac.digest(bytes.fromhex(self.secret), own + other, "sha256")

    async def open(self, protocol: Connection) -> None:
        """Connect to the server."""
        loop = asyncio.get_running_loop()
        if not self.host:
            await loop.create_unix_connection(lambda: protocol, f"\0{self.port}")
            return
        tls = None
        if self.certificate:
            tls = ssl.create_default_context(cadata=self.certificate)
            tls.check_hostname = False
        await loop.create_connection(lambda: protocol, self.host, int(self.port), ssl=tls)


class _Guarded(Connection):
    """A connection that reads nothing before the other end has proved that it knows the secret."""

    def __init__(
        self,
        address: Address,
        services: Mapping[str, Service],
        clock: Clock,
        own: Welcome,
        admitted: Callable[[_Guarded, Welcome], None] = lambda *_: None,
        lost_error: Callable[[str], JackfieldError] | None = None,
    ) -> None:
        super().__init__("a stranger", services, clock, limit=STRANGER_LIMIT, lost_error=lost_error)
        self._address, self._admit = address, admitted
        self._own = own if own.session else msgspec.structs.replace(own, session=self.session)
        self._nonce, self._challenge = secrets.token_bytes(32), b""
        self.admitted: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self.lost.add_done_callback(lambda _: self.admitted.cancel())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Challenge the other end."""
        super().connection_made(transport)
        self.send(Hello(self._nonce))

    def handle(self, message: Message) -> None:
        """Handle a message; before the proof only those of the handshake are accepted."""
        if self.admitted.done():
            super().handle(message)
        elif isinstance(message, Hello) and not self._challenge and message.nonce != self._nonce:
            self._challenge = message.nonce
            self.send(msgspec.structs.replace(self._own, proof=self._address.proof(self._nonce, message.nonce)))
        elif isinstance(message, Welcome) and self._knows_secret(message):
            self.limit, self.name, self.process = LIMIT, message.name, Process(**message.process)
            self.admitted.set_result(message)
            self._admit(self, message)
        else:
            self.refused(RpcError("it has not proved that it knows the secret"))

    def _knows_secret(self, message: Welcome) -> bool:
        return bool(self._challenge) and hmac.compare_digest(
            message.proof, self._address.proof(self._challenge, self._nonce)
        )


def _welcome(name: str, services: Mapping[str, Service], session: str = "") -> Welcome:
    fingerprints = {each: service.contract.fingerprint for each, service in services.items()}
    return Welcome(b"", name, attrs.asdict(Process.of(os.getpid())), fingerprints, session)


class Server:
    """Serves objects to every process that has its address. It belongs to one event loop."""

    def __init__(
        self,
        name: str,
        services: Mapping[str, Service],
        clock: Clock,
        heartbeat_seconds: float,
        on_end: Callable[[Connection, str], Awaitable[None]] | None = None,
        *,
        watches: bool = True,
    ) -> None:
        """
        Args:
            name: of this process, for messages.
            services: what clients may call.
            clock: through which every wait goes.
            heartbeat_seconds: a client that is silent for so long is dead, and so is this process for a client.
            on_end: awaited once for each client that has ended, with the reason, after its calls were cancelled.
            watches: end clients that are silent, and report the deaths of clients; else others do.
        """
        self._name, self._services, self._clock, self._seconds = name, services, clock, heartbeat_seconds
        self._on_end, self._watches = on_end, watches
        self._strangers: set[_Guarded] = set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.clients: dict[str, Connection] = {}  #: by session
        self.refused = 0  #: connections that were not admitted
        self.address: Address

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen: within this host where ``host`` is loopback and no port is asked for, else with TLS.

        Raises:
            RpcError: ``rpc.address``: the address is taken, or none of this machine's.
        """
        loop, name = asyncio.get_running_loop(), f"jackfield-{secrets.token_hex(12)}"
        near = is_loopback(host)
        tls, certificate = (None, "") if near else server_tls()
        try:
            if near and not port and sys.platform == "linux":
                self._server = await loop.create_unix_server(self._stranger, f"\0{name}")
                place: tuple[str, int | str] = "", name
            else:
                self._server = await loop.create_server(self._stranger, host, port, ssl=tls)
                place = host, self._server.sockets[0].getsockname()[1]
        except OSError as error:
            what = f"{self._name} cannot listen: {error}"
            raise RpcError(what, code="rpc.address", where=f"{host}:{port}", fix="choose another port") from error
        self.address = Address(
            host=place[0],
            port=place[1],
            secret=secrets.token_hex(32),
            certificate=certificate,
            heartbeat_seconds=self._seconds,
            process=Process.of(os.getpid()),
        )
        return self.address

    def _stranger(self) -> asyncio.BaseProtocol:
        """Make the protocol of a connection that may turn out to be a client's."""
        own = _welcome(self._name, self._services)
        guarded = _Guarded(self.address, self._services, self._clock, own, self._admitted)
        self._strangers.add(guarded)
        loop = asyncio.get_running_loop()
        late = loop.call_later(_PROOF_SECONDS, guarded.end, "did not say who it is")
        if len(self._strangers) > _STRANGERS:
            loop.call_soon(guarded.end, "came when there were too many strangers")
        guarded.admitted.add_done_callback(lambda done: self._known(guarded, late, done.cancelled()))
        return guarded

    def _known(self, guarded: _Guarded, late: asyncio.TimerHandle, refused: bool) -> None:
        late.cancel()
        self._strangers.discard(guarded)
        self.refused += refused

    def _admitted(self, connection: _Guarded, welcome: Welcome) -> None:
        owner = self.clients.get(welcome.session)
        if owner is not None:  # a second connection of a client, over which its thread sends heartbeats
            connection.handle = lambda *_: setattr(owner, "heard", True)  # type: ignore[method-assign]
            owner.lost.add_done_callback(lambda _: connection.end("its client has ended"))
            return
        self.clients[connection.session] = connection
        task = asyncio.get_running_loop().create_task(self._keep(connection))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep(self, connection: Connection) -> None:
        """Watch a client until it ends; then report it to the others, unless it has done its work."""
        seconds = self._seconds
        reason = await (watch(connection, seconds, self._clock) if self._watches else asyncio.shield(connection.lost))
        del self.clients[connection.session]
        if self._watches and reason != _ENDED and self._server is not None and self._server.is_serving():
            text = f"{connection.name} ({connection.process}) {reason}"
            logging.getLogger("jackfield").warning("%s", text)
            for other in self.clients.values():
                other.send(News(text))
        await connection.close()
        if self._on_end is not None:
            await self._on_end(connection, reason)

    async def close(self) -> None:
        """Say goodbye to the clients and stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
        for each in [*self.clients.values(), *self._strangers]:
            await each.close(f"{self._name} has ended")
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def connect(
    address: Address,
    name: str,
    clock: Clock,
    contracts: Mapping[str, Contract],
    services: Mapping[str, Service] | None = None,
    lost_error: Callable[[str], JackfieldError] | None = None,
    *,
    kills: bool = True,
) -> Connection:
    """Connect to a server, and watch it.

    Args:
        address: of the server.
        name: of this process, as the server calls it.
        clock: through which every wait goes.
        contracts: of the services that will be called, by name.
        services: what the server may call here.
        lost_error: makes the error of calls after the end from its reason; None: ``rpc.lost``.
        kills: whether a server that sends no heartbeats is killed, if it runs on this machine.

    Raises:
        RpcError: ``rpc.lost``: it cannot be reached; ``rpc.version``: its contracts are others.
    """
    own = _welcome(name, services or {})
    connection = _Guarded(address, services or {}, clock, own, lost_error=lost_error)
    welcome = await _opened(connection, address, clock)
    for service, contract in contracts.items():
        found = welcome.contracts.get(service)
        if found != contract.fingerprint:
            connection.end("speaks another version")
            raise RpcError(
                "two processes have other versions of Jackfield",
                code="rpc.version",
                where=service,
                expected=contract.fingerprint,
                found=found,
                fix="install the same version on both sides",
            )
    watching = asyncio.create_task(watch(connection, address.heartbeat_seconds, clock, kills=kills))
    connection.lost.add_done_callback(lambda _: watching.done())  # keeps a reference to the task
    if not address.process.is_near:
        beating = _beating(address, msgspec.structs.replace(own, session=welcome.session), connection.lost)
        threading.Thread(target=asyncio.run, args=(beating,), name="jackfield-heartbeat", daemon=True).start()
    return connection


async def _opened(connection: _Guarded, address: Address, clock: Clock) -> Welcome:
    who, seconds = f"{address.process} to answer", address.heartbeat_seconds
    try:
        await clock.wait_for(address.open(connection), seconds, who)
        return await clock.wait_for(asyncio.shield(connection.admitted), seconds, who)
    except (OSError, DeadlineExceeded, asyncio.CancelledError) as error:
        connection.process = address.process
        connection.end(f"did not answer: {error}")
        if isinstance(error, asyncio.CancelledError) and not connection.admitted.cancelled():
            raise
        raise connection.error() from error


async def _beating(address: Address, own: Welcome, lost: asyncio.Future[str]) -> None:
    """Send heartbeats over a connection of their own, in a thread: the event loop may be busy for long."""
    connection = _Guarded(address, {}, Clock(), own)
    with suppress(RpcError):  # the server may have ended meanwhile
        await _opened(connection, address, Clock())
    while not (lost.done() or connection.lost.done()):
        connection.send(Heartbeat())
        await asyncio.wait((connection.lost,), timeout=address.heartbeat_seconds / LOOKS)
    await connection.leave(_ENDED)


async def watch(connection: Connection, seconds: float, clock: Clock, *, kills: bool = True) -> str:
    """Wait for the end of a connection and return its reason; ``kills`` a silent process where that is possible."""

    def heard() -> bool:
        connection.send(Heartbeat())
        found, connection.heard = connection.heard, False
        return found

    silent = asyncio.ensure_future(until_silent(connection.process, heard, clock, seconds))
    try:
        await asyncio.wait((silent, connection.lost), return_when=asyncio.FIRST_COMPLETED)
    finally:
        silent.cancel()
    if not connection.lost.done():
        at_work = f" while it had to {connection.doing}" if connection.doing else ""
        end = " and was killed" if kills and connection.process is not None and connection.process.kill() else ""
        connection.silent(f"sent no heartbeat for {seconds:g} s{at_work}{end} (deadlines.heartbeat)")
    return await connection.lost
