"""A reward that runs model-written code against tests, as a plugin."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import RewardError
from jackfield_reward_sandbox.cases import extract, field
from jackfield_reward_sandbox.settings import Config
from jackfield_sandbox import box
from jackfield_sandbox.box import LEVELS, remove_tree
from jackfield_user_code import UserCodePool, WorkerLimits, try_first

_SHARE = 0.8  #: of a deadline that the tests may take
_PROBE_SECONDS = 120.0
_FIXES = {
    "namespaces": "allow user namespaces (in Docker: a seccomp profile with unshare and mount; on Ubuntu: an AppArmor "
    "profile, or kernel.apparmor_restrict_unprivileged_userns=0), or ask for isolation: filters",
    "filters": "use Linux 6.12 or later with Landlock, and as root a Python that other users can read, or ask for "
    "isolation: limits",
}


class SandboxReward(RewardAgent):
    """A reward that is the share of tests that a response's code passes.

    Code and tests run in processes of their own, isolated as :attr:`level` says. Dimensions of each score: ``passed``,
    the share of tests, and, for Python, ``compiled``. Metrics: those, ``well_formed``, ``late`` (not all tests were run
    within the time) and ``isolation``, the level's number. Tests that cannot be run are a failure that is final.
    """

    def __init__(self, config: Config, context: RewardContext) -> None:
        super().__init__(config, context)
        settings = {**attrs.asdict(config), "program": config.program}
        limits = WorkerLimits(memory_bytes=None, heartbeat_seconds=context.heartbeat_seconds)
        self._pool = UserCodePool(
            "jackfield_reward_sandbox.supervisor:Supervisor",
            workers=config.workers, method="run", keywords=settings, limits=limits, clock=context.clock,
            logs=context.logs,
        )  # fmt: skip
        self.level: str | None = None  #: of isolation, after the start
        self._folder: str | None = None  #: of files, which outlive a worker process that is killed

    @property
    def concurrency(self) -> int:
        """Return the number of worker processes."""
        workers: int = self.config.workers
        return workers

    @property
    def version(self) -> str:
        """Return a digest of this package, the library and the interpreter's version."""
        return f"{_digest()}-{self.config.python or platform.python_version()}-{self.level}"

    async def start(self) -> None:
        """Find the level of isolation that this machine allows; ``reward.isolation`` if it is less than asked for.

        Then try the tests of the first task (``reward.first-task``).
        """
        await self._pool.start()
        if self.level is not None:
            return
        asked = self.config.isolation
        task = {"probe": asked, "folder": self._own_folder()}
        result = await self._pool.call({"task": task}, _PROBE_SECONDS, name="the probe of isolation")
        if result.status != "ok":
            raise RewardError("the sandbox cannot start", code="reward.isolation", found=result.error)
        self.level, reasons = result.value["level"], result.value["reasons"]
        if self.level is None:
            raise RewardError(
                f"this machine does not allow isolation {asked!r}",
                code="reward.isolation", where="isolation", expected=asked if asked != "auto" else "at least limits",
                found="; ".join(f"{level}: {reason}" for level, reason in reasons.items()),
                fix=_FIXES.get(asked, "use Linux, and as root a Python that other users can read, or isolation: none"),
            )  # fmt: skip
        why = "".join(f"; not {level}: {reason}" for level, reason in reasons.items())
        weak = LEVELS.index(self.level) < LEVELS.index("filters")  # the network is open, for one
        level = logging.WARNING if weak else logging.INFO
        logging.getLogger("jackfield").log(level, "the sandbox runs code with isolation %s%s", self.level, why)
        await try_first(self, "reward")

    async def close(self) -> None:
        """Kill the worker processes, and all that they started."""
        await self._pool.close()
        if self._folder is not None:
            await asyncio.to_thread(remove_tree, Path(self._folder))
            self._folder = None

    def _own_folder(self) -> str:
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="jackfield-sandbox-")
            os.chmod(self._folder, 0o711)  # code may run as another user
        return self._folder

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Run the tests of one response."""
        if self.level is None:
            await self.start()
        config: Config = self.config
        tests = request.ground_truth if config.tests_field is None else field(request.extra_info, config.tests_field)
        entry = str(field(request.extra_info, config.entry_point_field) or "")
        code = extract(request.model_text, config.extract, config.counted_fences)
        seconds = min(config.task_seconds, _SHARE * request.deadline_seconds)
        before = field(request.extra_info, config.preamble_field) if config.preamble_field else None
        if code is not None:
            code = "\n".join(part for part in (config.preamble, str(before or ""), code) if part)
        task: dict[str, Any] = {"code": code, "tests": tests, "entry": entry, "level": self.level}
        task["folder"] = self._own_folder()
        task |= {"seconds": seconds, "stop": config.score == "all"}
        name = f"sample {request.idempotency_key}"
        result = await self._pool.call({"task": task}, request.deadline_seconds, name=name)
        if result.status != "ok":
            return ScoreResult(status="timeout" if result.status == "timeout" else "failed", error=result.error)
        return self._judged(result.value)

    def _judged(self, found: dict[str, Any]) -> ScoreResult:
        config: Config = self.config
        if "refused" in found:
            return ScoreResult(status="failed", error=found["refused"], is_final=True)
        if found["outcomes"] is None:
            return self._result(0.0, False, "the response has no block of code", well_formed=0.0)
        outcomes, tests = found["outcomes"], found["tests"]
        for outcome in outcomes:
            if outcome["broken"]:
                error = f"[reward.tests] the test {outcome['name']} cannot be run: {outcome['reason']}"
                return ScoreResult(status="failed", error=error, is_final=True)
            if outcome["timed_out"] and config.on_timeout == "fail":
                return ScoreResult(status="timeout", error=f"test {outcome['name']}: {outcome['reason']}")
        if found["late"] and config.on_timeout == "fail":
            return ScoreResult(status="timeout", error=f"the time of all {tests} tests ran out")
        if not found["compiled"]:
            return self._result(0.0, False, f"it does not compile: {found['reason']}")
        passed = sum(outcome["passed"] for outcome in outcomes)
        why = next((f"test {each['name']}: {each['reason']}" for each in outcomes if not each["passed"]), None)
        why = why or ("the time of all tests ran out" if found["late"] else f"all {tests} tests passed")
        return self._result(passed / tests, True, why, late=float(found["late"]))

    def _result(self, passed: float, compiled: bool, explanation: str, **metrics: float) -> ScoreResult:
        config: Config = self.config
        dimensions = {"passed": passed} | ({} if config.command else {"compiled": float(compiled)})
        known = {"well_formed": 1.0, "late": 0.0, "isolation": float(LEVELS.index(self.level or "none")), **metrics}
        score = passed if config.score == "fraction" else float(passed == 1.0)
        return ScoreResult(score=score, dimensions=dimensions, metrics=known, explanation=explanation)


@functools.cache
def _digest() -> str:
    folders = (Path(__file__).parent, Path(box.__file__).parent)
    files = [file for folder in folders for file in sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
