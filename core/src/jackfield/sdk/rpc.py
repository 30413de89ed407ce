"""The public names of :mod:`jackfield.rpc` for plugins whose processes call each other."""

from __future__ import annotations

from jackfield.rpc import Address, Connection, Contract, Process, Server, Service, caller, connect, stub
from jackfield.rpc.sockets import is_loopback

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
