"""The broadcast group, whose members exchange addresses through the session."""

from __future__ import annotations

import asyncio
import base64
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d

#: Members forward a broadcast along a tree. With pieces, they receive one while they forward the previous one; each
#: piece costs system calls and changes of threads.
_PIECE_BYTES = 32 * 2**20
_UNDER_WAY = 1  #: pieces beside the newest one


class SessionStore(c10d.Store):
    """The store for exchanging addresses. A value that is set here is sent to all through the session.

    It replaces a ``TCPStore``, which accepts every process that finds its port.
    """

    def __init__(self, seconds: float, publish: Callable[[str, str], None]) -> None:
        """Wait up to ``seconds`` for a member's value; ``publish`` sends to the others, from any thread."""
        super().__init__()
        self._seconds = seconds
        self._publish = publish
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False

    def put(self, key: str, value: str) -> None:
        """Store a value that another member has published."""
        with self._changed:
            self._values[key] = base64.b64decode(value)
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits: no more values will come."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def set(self, key: str, value: Any) -> None:
        """Publish a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        text = base64.b64encode(content).decode()
        self.put(key, text)
        self._publish(key, text)

    def get(self, key: str) -> bytes:
        """Return a value once it exists."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for values."""
        seconds = self._seconds if timeout is None else min(timeout.total_seconds(), self._seconds)
        with self._changed:
            there = self._changed.wait_for(lambda: self._closed or all(key in self._values for key in keys), seconds)
        missing = [key for key in keys if key not in self._values]
        if missing:
            why = "the transfer ended" if there else f"none within {seconds:.6g} s"
            raise RuntimeError(f"the group's members published no {', '.join(missing)}: {why}")

    def check(self, keys: list[str]) -> bool:
        """Return whether the values exist."""
        return all(key in self._values for key in keys)

    def set_timeout(self, timeout: timedelta) -> None:
        """Ignore the timeout: the transfer's deadline holds."""


class Group:
    """One member of the group. Blocking calls run in a thread, in the order of the calls."""

    def __init__(self, backend: str, rank: int, size: int, host: str, store: SessionStore, seconds: float) -> None:
        """Join the group until the deadline; rank 0 is the sender, and ``host`` is this machine's address for gloo."""
        self.backend = backend
        self.until(seconds)
        self._store = store
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weights-broadcast")
        self._group: Any = None
        self.made = self._thread.submit(self._make, rank, size, host)  #: done when all members have connected

    def until(self, seconds: float) -> None:
        """Set the deadline of all further broadcasts, in ``seconds`` from now."""
        self._ends = time.monotonic() + seconds

    def _make(self, rank: int, size: int, host: str) -> None:
        seconds = timedelta(seconds=max(self._ends - time.monotonic(), 0.001))
        library: Any = distributed  # the stubs do not know a build's contents
        if self.backend == "nccl":
            options = library.ProcessGroupNCCL.Options()
            options._timeout = seconds
            self._group = library.ProcessGroupNCCL(self._store, rank, size, options)
            return
        options = library.ProcessGroupGloo._Options()
        options._devices = [library.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = seconds
        self._group = library.ProcessGroupGloo(self._store, rank, size, options)

    def broadcast(self, buffer: torch.Tensor) -> Future[None]:
        """Copy the sender's bytes into every member's buffer, uint8 ``[bytes]``, after earlier calls."""
        return self._thread.submit(self._broadcast, buffer)

    def _broadcast(self, buffer: torch.Tensor) -> None:
        seconds = timedelta(seconds=max(self._ends - time.monotonic(), 0.001))
        under_way: deque[Any] = deque()
        for piece in buffer.split(_PIECE_BYTES):
            under_way.append(self._group.broadcast(piece, 0, timeout=seconds))
            if len(under_way) > _UNDER_WAY:
                under_way.popleft().wait()
        for work in under_way:
            work.wait()
        if buffer.is_cuda:  # NCCL's wait() is the stream's, not ours
            torch.cuda.current_stream(buffer.device).synchronize()

    async def close(self) -> None:
        """Leave the group after a running broadcast, which ends when a peer leaves or at the deadline."""
        self._store.close()
        if self.backend == "nccl" and self._group is not None:
            self._group.abort()  # a broadcast that lacks a member does not end by itself
        await asyncio.wrap_future(self._thread.submit(self._leave))
        self._thread.shutdown()

    def _leave(self) -> None:
        self._group = None
