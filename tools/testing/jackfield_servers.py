"""Real servers for tests and benchmarks: Debian's PostgreSQL and Redis, on loopback, in temporary folders.

Each dies with the thread that started it, also by ``kill -9`` (``setpriv --pdeathsig``), and with :meth:`Server.close`.
Nothing of what the packages installed as services is used. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

SECONDS = 30.0  #: longest time for a start or an end
PASSWORD = "a password: %/@"  #: with characters that a URL has to escape
QUOTED_PASSWORD = "a%20password%3A%20%25%2F%40"


def postgres_programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``, the newest where there are several."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[4]))
    if found:
        return found[-1].parent
    program = shutil.which("initdb")
    return Path(program).resolve().parent if program else None


def redis_program() -> str | None:
    """``redis-server``."""
    return shutil.which("redis-server")


class Server(ABC):
    """A server process with a folder of its own, that can be killed, stopped and started again at the same address."""

    ready: str  #: what it says when it accepts connections
    user: str | None = None  #: whom it runs as, where we are root
    end: str = "KILL"  #: the signal that ends it with all its processes

    def __init__(self) -> None:
        # another user cannot reach what lies below a folder of ours
        place = "/tmp" if self._drops else None
        self.folder = Path(tempfile.mkdtemp(prefix=f"jackfield-{type(self).__name__.lower()}-", dir=place))
        self.port = _free_port()
        self._process: subprocess.Popen[str] | None = None
        self._log: list[str] = []
        if self.user is not None and self._drops:
            shutil.chown(self.folder, self.user, self.user)

    @abstractmethod
    def command(self) -> Sequence[str]:
        """The server in the foreground, with its log on the standard streams."""

    def start(self) -> None:
        """Start, and return when it accepts connections."""
        self._log.clear()
        self._process = subprocess.Popen(
            [*self._drop(), *self.command()],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "LC_ALL": "C"},
        )
        accepts = threading.Event()
        threading.Thread(target=self._read, args=(self._process, accepts), daemon=True).start()
        if not accepts.wait(SECONDS) or self._process.poll() is not None:
            log = "".join(self._log[-20:])
            self.kill()
            raise RuntimeError(f"{self.command()[0]} did not start within {SECONDS:g} s:\n{log}")

    def kill(self) -> None:
        """``kill -9`` of the server and all its processes; return when they are gone."""
        if self._process is None:
            return
        with contextlib.ExitStack() as stack:
            watched = []
            for process in [self._process.pid, *_children(self._process.pid)]:
                with contextlib.suppress(ProcessLookupError):
                    watched.append(os.pidfd_open(process))
                    stack.callback(os.close, watched[-1])
            for descriptor in watched:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
            for descriptor in watched:
                select.select([descriptor], [], [], SECONDS)
        self._process.wait(SECONDS)
        self._process = None

    def pause(self) -> None:
        """Stop answering, with all connections open (SIGSTOP)."""
        for process in self._processes():
            os.kill(process, signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after :meth:`pause`."""
        for process in self._processes():
            os.kill(process, signal.SIGCONT)

    def _processes(self) -> list[int]:
        assert self._process is not None, "the server does not run"
        return [self._process.pid, *_children(self._process.pid)]

    def close(self) -> None:
        """End it and remove its folder."""
        if self._process is not None:
            self._process.send_signal(signal.Signals[f"SIG{self.end}"])
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(SECONDS)
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _drop(self) -> list[str]:
        """Become another user, then ask for a signal when the parent dies: in this order, or the kernel forgets."""
        user = str(self.user)
        identity = ["--reuid", user, "--regid", user, "--clear-groups"] if self._drops else []
        return ["setpriv", *identity, "--pdeathsig", self.end, "--"]

    @property
    def _drops(self) -> bool:
        return self.user is not None and os.geteuid() == 0

    def _run(self, *command: str) -> None:
        """Run a program to its end as the server's user."""
        subprocess.run(
            [*self._drop(), *command],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=True,
            timeout=SECONDS,
        )

    def _read(self, process: subprocess.Popen[str], accepts: threading.Event) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self._log.append(line)
                del self._log[:-100]
                if self.ready in line:
                    accepts.set()
        accepts.set()


class PostgresServer(Server):
    """A cluster with the database and superuser ``jackfield``; the password is always asked for."""

    ready = "database system is ready to accept connections"
    user = "postgres"
    end = "QUIT"  # at once, and it waits for its children

    def __init__(self) -> None:
        super().__init__()
        programs = postgres_programs()
        assert programs is not None, "PostgreSQL is not installed"
        self._programs = programs
        self._data = self.folder / "data"
        secret = self.folder / "password"
        secret.write_text(PASSWORD, encoding="utf-8")
        if self._drops:
            shutil.chown(secret, "postgres", "postgres")
        options = ["--username=jackfield", f"--pwfile={secret}", "--auth=scram-sha-256", "--no-sync", "--no-locale"]
        self._run(str(programs / "initdb"), "-D", str(self._data), "--encoding=UTF8", *options)
        secret.unlink()

    @property
    def url(self) -> str:
        """Of the database, with the password."""
        return f"postgresql://jackfield:{QUOTED_PASSWORD}@127.0.0.1:{self.port}/postgres"

    def command(self) -> Sequence[str]:
        """``postgres``."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "dynamic_shared_memory_type": "mmap",  # nothing of it is left in /dev/shm after kill -9
            "fsync": "off",  # what a killed server wrote, the kernel has
            "max_connections": "40",
            "shared_buffers": "32MB",
        }
        options = [f"--{name}={value}" for name, value in settings.items()]
        return [str(self._programs / "postgres"), "-D", str(self._data), "-p", str(self.port), *options]


class RedisServer(Server):
    """A server with a password; settings of ``redis.conf`` by name, with ``_`` for ``-``."""

    ready = "eady to accept connections"

    def __init__(self, **settings: str) -> None:
        super().__init__()
        self.settings = {"appendonly": "yes", "appendfsync": "everysec", "save": "", "requirepass": PASSWORD}
        self.settings |= settings

    @property
    def url(self) -> str:
        """Of the first database, with the password."""
        return f"redis://:{QUOTED_PASSWORD}@127.0.0.1:{self.port}/0"

    def command(self) -> Sequence[str]:
        """``redis-server``."""
        options = [part for name, value in self.settings.items() for part in (f"--{name.replace('_', '-')}", value)]
        return [redis_program() or "redis-server", "--port", str(self.port), "--bind", "127.0.0.1", *options]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _children(process: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return [each for child in found for each in (child, *_children(child))]
