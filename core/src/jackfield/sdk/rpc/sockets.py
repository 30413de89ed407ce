"""Servers and clients of the RPC: addresses, authentication and detection of dead peers.

Within a host a server listens on an abstract Unix address; otherwise on a TCP port with TLS, whose certificate is in
the address file. Both ends prove that they know the file's secret before anything else is read.

For a process on this machine, the kernel reports whether any of its threads can run, so that long computations do not
count as silence. A process on another machine sends heartbeats over its connections. A process that is silent for
``deadlines.heartbeat`` seconds is killed if possible, so that it does no harm when it wakes up.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import json
import logging
import os
import secrets
import ssl
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import attrs
import msgspec

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, JackfieldError, RpcError
from jackfield.files import replace_file
from jackfield.sdk.rpc.connection import Connection, Service
from jackfield.sdk.rpc.wire import Contract, Heartbeat, Process

LOOKS = 4  #: checks of a process, and heartbeats that it sends, per deadline
_STRANGERS = 64  #: maximum number of unauthenticated connections; further ones are closed at once
_PROOF_SECONDS = 10.0
_CERTIFICATE_DAYS = 3650
_ENDED = "has ended"  #: reason of the end of a client that has finished


@attrs.frozen(kw_only=True)
class Address:
    """The address of a server and the secrets that a client needs to connect, as plain values."""

    host: str  #: empty: an abstract Unix address
    port: int | str
    secret: str
    certificate: str = ""  #: PEM; empty: without TLS
    heartbeat_seconds: float
    process: Process

    def write(self, file: Path, **further: str) -> None:
        """Write the address and ``further`` values to a file that only this user can read.

        A process that can read the file may call all services.
        """
        replace_file(file, json.dumps({**attrs.asdict(self), **further}), mode=0o600, durable=False)

    @classmethod
    def read(cls, file: Path) -> Address:
        """Read an address that a server wrote. Raise ``rpc.address`` if there is none."""
        try:
            return msgspec.json.decode(file.read_bytes(), type=cls)
        except (OSError, ValueError, TypeError) as error:
            raise RpcError("no server's address is there", code="rpc.address", where=str(file), found=error) from error


@attrs.define(eq=False)
class Server:
    """A server of objects for every process that has its address. It belongs to one event loop."""

    _name: str  #: name of this process, for messages
    _services: Mapping[str, Service]  #: services that clients may call
    _clock: Clock  #: time source for all waits
    _heartbeat_seconds: float  #: silence after which a client, or this process for a client, counts as dead
    #: awaited once for each ended client, with the reason, after its calls were cancelled
    _on_end: Callable[[Connection, str], Awaitable[None]] | None = None
    #: whether to end silent clients and report the deaths of clients; if False, others do
    _watches: bool = attrs.field(default=True, kw_only=True)
    clients: dict[str, Connection] = attrs.field(factory=dict, init=False)  #: by session
    refused: int = attrs.field(default=0, init=False)  #: number of connections that were not admitted
    address: Address = attrs.field(init=False)
    _server: asyncio.Server | None = attrs.field(default=None, init=False)
    _kept: dict[Connection, asyncio.Task[None]] = attrs.field(factory=dict, init=False)

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> Address:
        """Listen on a Unix address if ``host`` is loopback and ``port`` is 0, else on TCP with TLS.

        Raises ``rpc.address`` if the address is in use, or is not an address of this machine.
        """
        loop, where, place = asyncio.get_running_loop(), f"{host}:{port}", f"jackfield-{secrets.token_hex(12)}"
        tls, certificate = (None, "") if is_loopback(host) else _server_tls()
        try:
            if tls is None and not port and sys.platform == "linux":
                host, self._server = "", await loop.create_unix_server(self._stranger, f"\0{place}")
            else:
                self._server = await loop.create_server(self._stranger, host, port, ssl=tls)
                place = self._server.sockets[0].getsockname()[1]
        except OSError as error:
            what = f"{self._name} cannot listen: {error}"
            fix = "choose another port" if error.errno == errno.EADDRINUSE else "give an address of this machine"
            raise RpcError(what, code="rpc.address", where=where, fix=fix) from error
        self.address = Address(
            host=host,
            port=place,
            secret=secrets.token_hex(32),
            certificate=certificate,
            heartbeat_seconds=self._heartbeat_seconds,
            process=Process.of(os.getpid()),
        )
        return self.address

    def _stranger(self) -> asyncio.BaseProtocol:
        """Return the protocol of a new, unauthenticated connection."""
        secret, services = self.address.secret, self._services
        connection = Connection("a stranger", services, self._clock, secret=secret, own_name=self._name)
        task = self._kept[connection] = asyncio.get_running_loop().create_task(self._keep(connection))
        task.add_done_callback(lambda _: self._kept.pop(connection))
        return connection

    async def _keep(self, connection: Connection) -> None:
        """Admit a client, watch it until it ends, and report its death to other clients."""
        strangers = sum(not each.admitted.done() for each in self._kept)
        seconds = _PROOF_SECONDS if strangers <= _STRANGERS else 0.0
        try:
            await self._clock.wait_for(asyncio.shield(connection.admitted), seconds, "a proof")
        except (asyncio.CancelledError, DeadlineExceeded):
            self.refused += 1
            connection.end("did not prove in time that it knows the secret")
            return
        if owner := self.clients.get(
            connection.welcome.session
        ):  # this connection carries the heartbeats of its thread
            connection.handle = lambda *_: setattr(owner, "heard", True)  # type: ignore[method-assign]
            connection.end(f"its client {await asyncio.shield(owner.lost)}")
            return
        self.clients[connection.session] = connection
        reason = await watch(connection, self._heartbeat_seconds, self._clock, ends=self._watches)
        del self.clients[connection.session]
        if self._watches and reason != _ENDED and self._server is not None and self._server.is_serving():
            text = f"{connection.name} ({connection.process}) {reason}"
            logging.getLogger("jackfield").warning("%s", text)
            for other in self.clients.values():
                other.send(Heartbeat(text))
        await connection.close()
        if self._on_end is not None:
            await self._on_end(connection, reason)

    async def close(self) -> None:
        """Send a goodbye to all clients and stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
        kept = list(self._kept.items())
        for connection, _ in kept:
            await connection.close(f"{self._name} has ended")
        await asyncio.gather(*(task for _, task in kept), return_exceptions=True)


async def connect(
    address: Address,
    name: str,
    clock: Clock,
    contracts: Mapping[str, Contract],
    services: Mapping[str, Service] | None = None,
    lost_error: Callable[[str], JackfieldError] | None = None,
    *,
    kills: bool = True,
    beats_for: str = "",
) -> Connection:
    """Connect this process, whose ``name`` the server gets, to a server, and watch it.

    ``contracts`` are those of the services to call, ``services`` those that the server may call here, both by name.
    ``lost_error`` creates the error of calls after the end from its reason; None: ``rpc.lost``. ``kills`` lets a server
    on this machine be killed when it sends no heartbeats. A connection with ``beats_for``, the session of another
    connection, only sends its heartbeats. Raises ``rpc.lost`` if the server cannot be reached, ``rpc.version`` if it
    has other contracts.
    """
    proves: Any = {"secret": address.secret, "own_name": name, "owner": beats_for}
    connection = Connection("a server", services or {}, clock, lost_error=lost_error, **proves)
    await _open(connection, address)
    expected = {service: contract.fingerprint for service, contract in contracts.items()}
    found = {service: connection.welcome.contracts.get(service) for service in contracts}
    if found != expected:
        connection.end("speaks another version")
        message, fix = "two processes have other versions of Jackfield", "install the same version on both sides"
        raise RpcError(message, code="rpc.version", where=str(address.process), expected=expected, found=found, fix=fix)
    if beats_for:
        return connection
    watching = asyncio.create_task(watch(connection, address.heartbeat_seconds, clock, kills=kills))
    connection.lost.add_done_callback(lambda _: watching.done())  # keeps a reference to the task
    if not address.process.is_near:
        beating = _beating(address, name, connection.welcome.session, connection.lost)
        threading.Thread(target=asyncio.run, args=(beating,), name="jackfield-heartbeat", daemon=True).start()
    return connection


async def _open(connection: Connection, address: Address) -> None:
    """Open a connection to a server, and wait until both ends have proved that they know the secret."""
    who, seconds, clock = f"{address.process} to answer", address.heartbeat_seconds, connection.clock
    loop, tls = asyncio.get_running_loop(), None
    if address.certificate:
        tls = ssl.create_default_context(cadata=address.certificate)
        tls.check_hostname = False
    if address.host:
        opening: Any = loop.create_connection(lambda: connection, address.host, int(address.port), ssl=tls)
    else:
        opening = loop.create_unix_connection(lambda: connection, f"\0{address.port}")
    try:
        await clock.wait_for(opening, seconds, who)
        await clock.wait_for(asyncio.shield(connection.admitted), seconds, who)
    except (OSError, DeadlineExceeded, asyncio.CancelledError) as error:
        connection.process = address.process
        connection.end(f"did not answer: {error}")
        if isinstance(error, asyncio.CancelledError) and not connection.admitted.cancelled():
            raise
        raise connection.error() from error


async def _beating(address: Address, name: str, session: str, lost: asyncio.Future[str]) -> None:
    """Send heartbeats over a separate connection in a thread, as the event loop may be busy for long."""
    with suppress(RpcError):  # the server may have ended
        connection = await connect(address, name, Clock(), {}, beats_for=session)
        while not (lost.done() or connection.lost.done()):
            connection.send(Heartbeat())
            await asyncio.wait((connection.lost,), timeout=address.heartbeat_seconds / LOOKS)
        await connection.close(_ENDED)


async def watch(connection: Connection, seconds: float, clock: Clock, *, kills: bool = True, ends: bool = True) -> str:
    """Send heartbeats until a connection ends, and return the reason of the end.

    With ``ends``, end the connection after ``seconds`` without a sign of life.

    Several checks must fail, so that a process that was itself stopped does not consider others dead.
    """
    process, silent = connection.process, 0
    while not connection.lost.done() and silent <= LOOKS:
        with suppress(DeadlineExceeded):
            await clock.wait_for(asyncio.shield(connection.lost), seconds / LOOKS, "the next look")
        connection.send(Heartbeat())
        heard, connection.heard = connection.heard, False
        lives = not ends or (process.can_run() if process is not None and process.is_near else heard)
        silent = 0 if lives else silent + 1
    if not connection.lost.done():
        at_work = f" while it had to {connection.doing}" if connection.doing else ""
        end = " and was killed" if kills and process is not None and process.kill() else ""
        connection.failed("silent", f"sent no heartbeat for {seconds:g} s{at_work}{end} (deadlines.heartbeat)")
    return await connection.lost


def is_loopback(host: str) -> bool:
    """Return whether an address is reachable only from this machine."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def _server_tls() -> tuple[ssl.SSLContext, str]:
    """Create a key and a certificate; return the server's context and the certificate as PEM."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError as error:
        fix = "pip install 'jackfield[distributed]'"
        raise RpcError("to listen beyond this machine needs cryptography", code="rpc.address", fix=fix) from error
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "jackfield")])
    begin, end = now - timedelta(days=1), now + timedelta(days=_CERTIFICATE_DAYS)
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), begin, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    certificate = builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    secret = key.private_bytes(serialization.Encoding.PEM, form, plain)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:  # readable only by this user
        file.write(secret + certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context, certificate.decode()
