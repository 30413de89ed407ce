"""The worker process of the agent: it starts the processes of a response's code, and compares what they give.

It has the expected values, and runs nothing of the response.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from jackfield.errors import RewardError
from jackfield_reward_sandbox.cases import Case, read_cases, same_texts, same_values
from jackfield_sandbox.box import GRACE, Box, Lost, a_user, last_line, probe
from jackfield_sandbox.values import decode
from jackfield_sandbox.wire import receive, send


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
                compiled, reason = reply["status"] == 0 and reply["end"] == "exit", last_line(reply["err"])
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
            return f"it ended with exit status {reply['status']}: {last_line(reply['err'])}"
        return ""

    def _check(self, boxes: _Boxes, case: Case, request: dict[str, Any]) -> Outcome:
        mine, theirs = socket.socketpair()
        with mine, theirs:
            mine.settimeout(GRACE)
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
            reason = f"{verdict['reason']}: {last_line(reply['err'])}"
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
