"""RPC between processes with iterations, cancellation, errors, deadlines, heartbeats and authentication."""

from __future__ import annotations

from jackfield.rpc.connection import Connection, Service, caller, stub
from jackfield.rpc.sockets import Address, Server, connect
from jackfield.rpc.wire import Codec, Contract, Process

__all__ = ["Address", "Codec", "Connection", "Contract", "Process", "Server", "Service", "caller", "connect", "stub"]
