"""A box: processes that run model-written code at a level of isolation, and the probe of what this machine allows.

A box kills every descendant of its process when it is closed, so use it in a worker process, as
``jackfield_user_code.UserCodePool`` makes them.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jackfield_sandbox import _confinement
from jackfield_sandbox._inside import remove_tree
from jackfield_sandbox.wire import receive, send

__all__ = ["GRACE", "LEVELS", "Box", "Lost", "a_user", "attempt", "last_line", "probe", "remove_tree"]

#: Levels of isolation, each stronger than those before it.
LEVELS = ("none", "limits", "filters", "namespaces")
_START = "import sys; sys.path.insert(0, {0!r}); from jackfield_sandbox import _inside; sys.path.pop(0); _inside.main()"
GRACE = 20.0  #: seconds for the processes of a test to start and to end
_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/tmp", "TMPDIR": "/tmp"}
_ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
_LAST_USER, _USERS, _FEWEST = 2_000_000_000, 40_000, 1000


class Lost(Exception):
    """The process that starts the tests is gone."""


def a_user() -> int | None:
    """Return a user of no other process for the code of this process; None without the right to choose one."""
    if os.geteuid():
        return None
    with open("/proc/self/uid_map") as file:
        ranges = [tuple(map(int, line.split())) for line in file]
    last = min(max(first + count for first, _, count in ranges) - 3, _LAST_USER)
    return None if last < _FEWEST else last - os.getpid() % min(_USERS, last // 2)


class Box:
    """The processes of one response's code, at a level of isolation."""

    def __init__(self, level: str, limits: Mapping[str, Any], folder: str) -> None:
        self.level = level
        self._user = None if level == "none" else a_user()
        self._folder = "" if level == "namespaces" else tempfile.mkdtemp(dir=folder)
        if self._folder:
            os.chmod(self._folder, 0o711)  # it is of another user's processes
        self._channel, other = socket.socketpair()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115
        settings: dict[str, Any] = {"level": level, "user": self._user, "folder": self._folder, "limits": dict(limits)}
        settings |= {"readable": list(limits["readable"]), "program": limits["program"]}
        package = str(Path(__file__).parent.parent)
        command = [limits["python"] or sys.executable, "-I", "-X", "utf8", "-c", _START.format(package)]
        with other:
            descriptor = other.fileno()
            self._process = subprocess.Popen(
                [*command, str(descriptor), json.dumps(settings)], pass_fds=[descriptor], env=_ENVIRONMENT,
                stdin=subprocess.DEVNULL, stdout=self._output, stderr=self._output, start_new_session=True,
            )  # fmt: skip
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        reply = self._receive(GRACE)
        if "unshared" in reply:
            self._map_users()
            send(self._channel, {})
            reply = self._receive(GRACE)
        if "ready" not in reply:
            raise Lost(reply.get("error", "it did not start"))

    def _map_users(self) -> None:
        """Map users of the new namespace: root and the code's user, or this user alone."""
        process = Path(f"/proc/{self._process.pid}")
        if self._user is not None:
            maps = [f"0 0 1\n1000 {self._user} 1\n"] * 2
        else:
            (process / "setgroups").write_text("deny")
            maps = [f"1000 {os.geteuid()} 1\n", f"1000 {os.getegid()} 1\n"]
        for name, text in zip(("uid_map", "gid_map"), maps, strict=True):
            (process / name).write_text(text)

    def _receive(self, seconds: float) -> Any:
        self._channel.settimeout(seconds)
        try:
            return receive(self._channel)[0]
        except (EOFError, OSError, ValueError) as error:
            self._output.seek(0)
            raise Lost(self._output.read()[-1000:].decode(errors="replace").strip() or "it ended") from error

    def ask(self, message: Mapping[str, Any], *descriptors: int) -> Any:
        """Run something, and return how it ended and what it wrote."""
        try:
            send(self._channel, message, descriptors)
        except OSError as error:
            raise Lost("it ended") from error
        return self._receive(message["seconds"] + GRACE)

    def close(self) -> None:
        """Kill all processes and remove their files."""
        self._channel.close()
        try:
            self._process.wait(GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _confinement.kill_all(whole_tree=False)  # of a process that was killed by the code
        self._output.close()
        if self._folder:
            remove_tree(Path(self._folder))


def last_line(text: str) -> str:
    """Return the last line of what a process printed."""
    return (text.strip().splitlines() or ["nothing was printed"])[-1][:500]


#: What code tries at the start. Each word that it prints is something that it could do.
_PROBE = """
import colorsys, json, os, sys
facts = json.loads(sys.stdin.read())
def attempt(name, function):
    try:
        if function():
            print(name)
    except BaseException:
        pass
def network():
    import socket
    return not socket.create_connection(("127.0.0.1", facts["port"]), 5).close()
attempt("environment", lambda: facts["name"] in os.environ)
attempt("environment", lambda: facts["name"].encode() in open(f"/proc/{facts['pid']}/environ", "rb").read())
attempt("network", network)
attempt("files", lambda: open(facts["folder"] + "/written", "w") is not None)
attempt("signals", lambda: os.kill(facts["pid"], 0) is None)
print("end")
"""
_NAME = "JACKFIELD_SANDBOX_PROBE"


def probe(isolation: str, limits: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return the level that this machine allows and the setting asks for, and why it allows no better one."""
    wanted = list(reversed(LEVELS[1:])) if isolation == "auto" else [isolation]
    reasons: dict[str, str] = {}
    for level in wanted:
        reason = attempt(level, limits, folder)
        if reason is None:
            return {"level": level, "reasons": reasons}
        reasons[level] = reason
    return {"level": None, "reasons": reasons}


def attempt(level: str, limits: Mapping[str, Any], folder: str) -> str | None:
    """Run code at a level that attacks this process; return why the level does not hold, or None.

    ``folder`` is for temporary files; other users may enter it.
    """
    if sys.platform != "linux":
        return "isolation needs Linux" if level != "none" else None
    forbidden = {"filters": {"environment", "network", "files", "signals"}}
    forbidden |= {"none": set(), "limits": set() if a_user() is None else {"environment"}}
    forbidden["namespaces"] = forbidden["filters"]
    target = tempfile.mkdtemp(dir=folder)
    os.chmod(target, 0o777)  # what only the level forbids
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        facts = {"port": port, "folder": target, "pid": os.getpid(), "name": _NAME}
        limits = {**limits, "command": None, "program": "probe.py"}
        try:
            box = Box(level, limits, folder)
            try:
                request = {"do": "stdin", "code": _PROBE, "stdin": json.dumps(facts), "seconds": 20.0}
                reply = box.ask(request)
            finally:
                box.close()
        except (Lost, OSError) as error:
            return str(error)
        finally:
            shutil.rmtree(target, ignore_errors=True)
    found = reply["out"].split()
    if "end" not in found:
        return f"Python does not run in it, as another user if this one is root: {last_line(reply['err'])}"
    reached = sorted(forbidden[level] & set(found))
    return f"code reached what it must not: {reached}" if reached else None
