"""The program of the process that imports the user's code and forks workers from it.

It is run by its path, not as a module of a package, and needs only the standard library, so it starts fast in any
interpreter. It takes orders from one socket, with a worker's socket beside each order to fork. The user's code cannot
reach these sockets once it is called, and its output goes through pipes that are read here. It also is the parent of
whatever a worker has left behind, and kills it.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import resource
import select
import signal
import socket
import sys
import threading
import types
import warnings
from contextlib import suppress
from typing import Any

if __name__ != "jackfield_user_code._child":  # run by its path: import its neighbours without their package
    _package = types.ModuleType("jackfield_user_code")
    _package.__path__ = [os.path.dirname(os.path.abspath(__file__))]
    sys.modules["jackfield_user_code"] = _package

from jackfield_user_code import _frames, _tree, _worker

if __name__ != "jackfield_user_code._child":  # the user's code may import the real package
    for _name in [name for name in sys.modules if name.partition(".")[0] == "jackfield_user_code"]:
        del sys.modules[_name]

_READ_BYTES = 1 << 18
_LOG_BYTES = 4 * 2**20  #: bytes of output per file; the previous file is also kept
_TAIL_BYTES = 8192  #: bytes of the end of the output that error messages show
_LAST_READS = 64  #: reads of what a worker that has ended left in its pipe


def main() -> None:
    """Obey until the other end of the socket closes; then kill everything."""
    descriptor, starter = map(int, sys.argv[-2:])
    _tree.die_with_parent(starter)  # at once while the user's code is imported
    _tree.adopt_orphans()
    for folder in sys.argv[1:-2]:
        sys.pycache_prefix, sys.dont_write_bytecode = folder, False
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    parent = _Parent(control)
    try:
        parent.obey()
    finally:
        parent.end()
        os._exit(0)


def _end_children() -> None:
    """Kill and reap all processes that descend from this one, which become its children when their parents end."""
    while found := _tree.children(os.getpid()):
        for pid in found:
            _tree.kill_tree(pid)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


class Output:
    """The pipe of a worker's output, the file that gets it, and its end."""

    def __init__(self, pipe: int, path: str | None) -> None:
        self.pipe, self._path, self.tail, self._file = pipe, path, bytearray(), -1
        self.pour(b"")  # errors name the file, also of a process that printed nothing

    def read(self) -> bool:
        """Move what the pipe has; return False at its end, or if it has nothing."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        self.pour(data)
        return bool(data)

    def pour(self, data: bytes) -> None:
        """Append to the file, of bounded size. A full disk ends nothing."""
        self.tail += data
        del self.tail[:-_TAIL_BYTES]
        if self._path is None or (not data and self._file >= 0):
            return
        with suppress(OSError):
            self._open(self._path)
            os.write(self._file, data)
            if os.fstat(self._file).st_size > _LOG_BYTES:
                os.replace(self._path, f"{self._path}.1")
                self._open(self._path)

    def _open(self, path: str) -> None:
        """Open the file, also if another process has moved it: the parent and the first worker share one."""
        if self._file >= 0:
            with suppress(OSError):
                if os.stat(path).st_ino == os.fstat(self._file).st_ino:
                    return
            os.close(self._file)
            self._file = -1
        os.makedirs(os.path.dirname(path), exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def close(self) -> None:
        """Take what is left in the pipe and close it."""
        for _ in range(_LAST_READS):
            if not self.read():
                break
        self.let_go()

    def let_go(self) -> None:
        """Close the descriptors."""
        os.close(self.pipe)
        if self._file >= 0:
            os.close(self._file)


class _Worker:
    """A forked process."""

    def __init__(self, number: int, pid: int, note: mmap.mmap, output: Output) -> None:
        self.number, self.pid, self.note, self.output = number, pid, note, output


class _Parent:
    """The parent of the workers."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._reader = control, _frames.Reader(2**31)
        self._sockets: list[int] = []  #: of workers that are to be forked
        self._workers: dict[int, _Worker] = {}  #: by process id
        self._kept: set[int] = set()  #: processes that the import has started
        self._request: dict[str, Any] = {}
        self._found: _worker.Found | None = None
        self._poll = select.poll()
        self._wake, self._waking = os.pipe()
        for descriptor in (self._wake, self._waking):
            os.set_blocking(descriptor, False)

    def obey(self) -> None:
        """Read orders and output, and notice the end of workers."""
        self._poll.register(self._control, select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        while True:
            ready = dict(self._poll.poll())
            for worker in list(self._workers.values()):
                if worker.output.pipe in ready and not worker.output.read():
                    self._poll.unregister(worker.output.pipe)  # closed by all: it may live on
            if self._wake in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready and not self._order():
                return

    def _order(self) -> bool:
        data, descriptors, _, _ = socket.recv_fds(self._control, _READ_BYTES, 64)
        self._sockets += descriptors
        for message in self._reader.feed(data):
            for order, *details in message:
                getattr(self, order)(*details)
        return bool(data)

    def _tell(self, *news: Any) -> None:
        self._control.sendall(_frames.packed(json.dumps([news])))

    def load(self, request: dict[str, Any], here: bool) -> None:
        """Import the code if workers are to be forked with it, and say how many threads forbid that."""
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if request["memory_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_AS, (request["memory_bytes"], request["memory_bytes"]))
        self._request = request
        error: Any = None
        if here:
            try:
                self._found = _worker.Found(request)
            except BaseException as raised:  # SystemExit is the user's code's, too
                error = getattr(raised, "refusal", None) or _worker.describe(raised)
        signal.signal(signal.SIGTERM, lambda *_: self._terminate())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        _tree.die_with_parent(os.getppid(), signal.SIGTERM)
        self._kept = set(_tree.children(os.getpid()))
        threads = _threads() if here and error is None else 0
        gc.collect()
        gc.freeze()  # the collector of a worker does not copy these pages
        self._tell("loaded", error, threads)

    def end(self) -> None:
        """Kill all workers and what they have started, and keep their last output."""
        for worker in self._workers.values():
            _tree.kill_tree(worker.pid)
        _end_children()
        for worker in self._workers.values():
            worker.output.close()

    def _terminate(self) -> None:
        self.end()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def fork(self, number: int, log: str | None) -> None:
        """Fork a worker that serves the next socket."""
        channel, note = self._sockets.pop(0), mmap.mmap(-1, _worker.NOTE.size)
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        parent = os.getpid()
        try:
            pid = _fork()
        except OSError as error:
            for descriptor in (channel, reading, writing):
                os.close(descriptor)
            self._tell("died", number, 1, f"cannot be forked: {error}", 0)
            return
        if pid == 0:
            try:
                os.close(reading)
                self._become_worker(parent, channel, writing, note)
            finally:
                os._exit(1)
        os.close(channel)
        os.close(writing)
        self._workers[pid] = _Worker(number, pid, note, Output(reading, log))
        self._poll.register(reading, select.POLLIN)
        self._tell("forked", number, pid)

    def _become_worker(self, parent: int, channel: int, output: int, note: mmap.mmap) -> None:
        os.setsid()
        _tree.die_with_parent(parent)
        _tree.adopt_orphans()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        ours = [self._control.detach(), self._wake, self._waking, *self._sockets]
        for worker in self._workers.values():
            worker.output.let_go()
        for descriptor in ours:
            os.close(descriptor)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        if "numpy.random" in sys.modules:  # Python seeds its own generator after a fork
            sys.modules["numpy.random"].seed()
        with socket.socket(fileno=channel) as serving:
            _worker.serve(serving, self._found, self._request, note)
        os._exit(0)

    def kill(self, number: int) -> None:
        """Kill a worker with everything that it has started."""
        for worker in list(self._workers.values()):
            if worker.number == number:
                _tree.kill_tree(worker.pid)
                self._buried(worker, os.waitpid(worker.pid, 0)[1])

    def _reap(self) -> None:
        """Bury workers that have ended, and kill what they have left behind."""
        for worker in list(self._workers.values()):
            pid, status = os.waitpid(worker.pid, os.WNOHANG)
            if pid:
                self._buried(worker, status)
        self._kill_orphans()

    def _kill_orphans(self) -> None:
        """Kill processes whose parents, workers, have ended. They became children of this process."""
        while orphans := [pid for pid in _tree.children(os.getpid()) if pid not in self._kept.union(self._workers)]:
            for pid in orphans:
                _tree.kill_tree(pid)
                with suppress(ChildProcessError):
                    os.waitpid(pid, 0)

    def _buried(self, worker: _Worker, status: int) -> None:
        del self._workers[worker.pid]
        self._kill_orphans()
        output = worker.output
        with suppress(KeyError):
            self._poll.unregister(output.pipe)
        output.close()
        (running,) = _worker.NOTE.unpack_from(worker.note)
        worker.note.close()
        code, tail = os.waitstatus_to_exitcode(status), output.tail.decode(errors="replace")
        self._tell("died", worker.number, code, tail, running)


def _fork() -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions warn of threads, which were counted
        return os.fork()


def _threads() -> int:
    """Return how many other threads the import has left that a fork would lose.

    Libraries such as OpenBLAS end their threads before a fork and start them again when needed: these do not count.
    """
    if threading.active_count() > 1:
        return threading.active_count() - 1
    if (pid := _fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    with suppress(OSError):
        return len(os.listdir("/proc/self/task")) - 1
    return 0


if __name__ == "__main__":
    main()
