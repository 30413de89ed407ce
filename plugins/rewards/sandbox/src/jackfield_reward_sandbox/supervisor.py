"""The worker process of the agent: it starts the processes of a response's code, and compares what they give.

It has the expected values, and runs nothing of the response.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.errors import RewardError
from jackfield_reward_sandbox import _confinement
from jackfield_reward_sandbox._inside import remove_tree
from jackfield_reward_sandbox._values import decode
from jackfield_reward_sandbox._wire import receive, send
from jackfield_reward_sandbox.cases import Case, read_cases, same_texts, same_values
from jackfield_reward_sandbox.settings import LEVELS

_START = (
    "import sys; sys.path.insert(0, {0!r}); from jackfield_reward_sandbox import _inside; sys.path.pop(0); "
    "_inside.main()"
)
_GRACE = 20.0  #: seconds for the processes of a test to start and to end
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
        reply = self._receive(_GRACE)
        if "unshared" in reply:
            self._map_users()
            send(self._channel, {})
            reply = self._receive(_GRACE)
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
        return self._receive(message["seconds"] + _GRACE)

    def close(self) -> None:
        """Kill all processes and remove their files."""
        self._channel.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        _confinement.kill_all(whole_tree=False)  # of a process that was killed by the code
        self._output.close()
        if self._folder:
            remove_tree(Path(self._folder))


@attrs.define
class Outcome:
    """The result of one test."""

    name: str
    passed: bool
    reason: str = ""
    broken: bool = False  #: whether the test itself cannot be run
    timed_out: bool = False


class Supervisor:
    """The tests of responses. An instance lives in a worker process, which sets the settings once."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings
        self._limits = settings

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """Run the tests of a response, or find the level of isolation."""
        if "probe" in task:
            return probe(task["probe"], self._limits, task["folder"])
        try:
            cases = self._cases(task)
        except RewardError as error:
            return {"refused": str(error)}
        if task["code"] is None:
            return {"outcomes": None}
        end = time.monotonic() + task["seconds"]
        outcomes: list[Outcome] = []
        compiled, reason, late = True, "", False
        with self._boxes(task["level"], task["folder"]) as boxes:
            if not self._settings["command"]:
                reply = boxes.ask({"do": "compile", "code": task["code"], "seconds": self._settings["seconds"]})
                compiled, reason = reply["status"] == 0 and reply["end"] == "exit", _last_line(reply["err"])
            for case in cases if compiled else ():
                seconds = min(self._settings["seconds"], end - time.monotonic())
                if late := seconds <= 0:
                    break
                outcomes.append(self._case(boxes, case, task["code"], seconds))
                if outcomes[-1].broken or (task["stop"] and not outcomes[-1].passed):
                    break
        found = [attrs.asdict(outcome) for outcome in outcomes]
        return {"compiled": compiled, "reason": reason, "outcomes": found, "late": late, "tests": len(cases)}

    def _cases(self, task: Mapping[str, Any]) -> list[Case]:
        cases = read_cases(task["tests"], task["entry"])
        if self._settings["command"] and any(case.kind != "stdin" for case in cases):
            why, found = "tests of functions need Python", self._settings["command"]
            raise RewardError(why, code="reward.tests", where="command", found=found)
        return cases

    @contextlib.contextmanager
    def _boxes(self, level: str, folder: str) -> Iterator[_Boxes]:
        boxes = _Boxes(level, self._limits, folder)
        try:
            yield boxes
        finally:
            boxes.close()

    def _case(self, boxes: _Boxes, case: Case, code: str, seconds: float) -> Outcome:
        request: dict[str, Any] = {"do": case.kind, "code": code, "seconds": seconds}
        if case.kind == "check":
            return self._check(boxes, case, request)
        request |= {"stdin": case.given} if case.kind == "stdin" else {"name": case.entry, "arguments": case.given}
        try:
            reply = boxes.ask(request)
        except Lost as error:
            return Outcome(case.name, False, f"the code killed the process that ran it: {error}")
        if reason := self._ending(reply, seconds):
            return Outcome(case.name, False, reason, timed_out=reply["end"] == "time")
        compare, tolerance = self._settings["compare"], self._settings["tolerance"] or 1e-6
        if case.kind == "stdin":
            passed = same_texts(case.expected, reply["out"], compare, tolerance)
            found = repr(reply["out"][:200])
        else:
            try:
                value = decode(json.loads(reply["value"]))
            except (ValueError, RecursionError):
                return Outcome(case.name, False, "the code's process sent no value")
            passed = same_values(case.expected, value, compare, tolerance, case.is_wrapped)
            found = repr(value)[:200]
        return Outcome(case.name, passed, "" if passed else f"expected {case.expected!r:.200}, found {found}")

    def _ending(self, reply: Mapping[str, Any], seconds: float) -> str:
        """Return why a process did not end well."""
        if reply["end"] == "time":
            return f"it ran longer than {seconds:.3g} s"
        if reply["end"] == "output":
            return f"it wrote more than {self._settings['output_bytes']} bytes"
        if reply["status"]:
            return f"it ended with exit status {reply['status']}: {_last_line(reply['err'])}"
        return ""

    def _check(self, boxes: _Boxes, case: Case, request: dict[str, Any]) -> Outcome:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.settimeout(_GRACE)
            send(mine, {"source": case.given, "call": case.call, "entry": case.entry})
            try:
                reply = boxes.ask(request, theirs.fileno())
            except Lost as error:
                return Outcome(case.name, False, f"the code killed the process that ran it: {error}")
            theirs.close()
            try:
                verdict, _ = receive(mine)
            except (EOFError, OSError, ValueError):
                verdict = {"passed": False, "reason": "the test did not end", "is_broken": False}
        reason = verdict["reason"] or self._ending(reply, request["seconds"])
        if not verdict["passed"] and reply["end"] != "exit":
            reason = self._ending(reply, request["seconds"])
        elif verdict["reason"].startswith("the code raised or ended"):
            reason = f"{verdict['reason']}: {_last_line(reply['err'])}"
        passed = verdict["passed"] and reply["end"] == "exit"
        late = reply["end"] == "time"
        return Outcome(case.name, passed, "" if passed else reason, verdict["is_broken"], late)


class _Boxes:
    """One box after another: one that the code has killed is replaced."""

    def __init__(self, *box: Any) -> None:
        self._arguments = box
        self._box: Box | None = Box(*box)
        level = self._box.level
        self._may_kill = level in ("none", "limits") and (level == "none" or a_user() is None)

    def ask(self, message: Mapping[str, Any], *descriptors: int) -> Any:
        """Send a message to a box, a new one if there is none, and return its answer."""
        self._box = self._box or Box(*self._arguments)
        try:
            return self._box.ask(message, *descriptors)
        except Lost as error:
            self.close()
            if self._may_kill:
                raise
            raise RewardError(
                "the process that runs code has ended, which code at this level cannot cause",
                code="reward.sandbox", where=f"isolation {self._arguments[0]}", found=str(error),
                fix="look at the machine's memory and limits",
            ) from error  # fmt: skip

    def close(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            box.close()


def _last_line(text: str) -> str:
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
        return f"Python does not run in it, as another user if this one is root: {_last_line(reply['err'])}"
    reached = sorted(forbidden[level] & set(found))
    return f"code reached what it must not: {reached}" if reached else None
