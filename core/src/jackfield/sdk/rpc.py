"""The RPC between processes, for plugins that start processes or serve sockets of their own."""

from __future__ import annotations

from jackfield.rpc import Address, Codec, Connection, Contract, Process, Server, Service, caller, connect, stub

__all__ = ["Address", "Codec", "Connection", "Contract", "Process", "Server", "Service", "caller", "connect", "stub"]
