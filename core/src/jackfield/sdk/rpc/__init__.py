"""RPC between processes with iterations, cancellation, errors, deadlines, heartbeats and authentication."""

from __future__ import annotations

from jackfield.sdk.rpc.connection import Connection, Service, caller, stub
from jackfield.sdk.rpc.sockets import Address, Server, connect, is_loopback
from jackfield.sdk.rpc.wire import Contract, Process

__all__ = [
    "Address",
    "Connection",
    "Contract",
    "Process",
    "Server",
    "Service",
    "caller",
    "connect",
    "is_loopback",
    "stub",
]
