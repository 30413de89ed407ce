"""Code that the model writes, run isolated."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.agent import AgentContext, AgentWorkerContext, ToolResult
from jackfield.errors import DeadlineExceeded, JackfieldError
from jackfield_sandbox.box import GRACE, LEVELS, remove_tree
from jackfield_tools.schemas import schema
from jackfield_tools.settings import SandboxCode, Tool
from jackfield_tools.sources import Arguments, Refused, Session, Source
from jackfield_user_code import UserCodePool, WorkerLimits

_PROBE_SECONDS = 120.0
_ABOUT = {
    "python": "Run a Python program and return what it prints. Each call starts afresh; there is no network.",
    "shell": "Run a shell script and return what it prints. Each call starts afresh; there is no network.",
}


class SandboxSource(Source):
    """A tool with the argument ``code``, in processes that are isolated from the machine."""

    def __init__(self, tool: Tool) -> None:
        super().__init__(tool)
        self._pool: UserCodePool | None = None
        self._folder: str | None = None  #: of files, which outlive a worker process that is killed
        self.level: str | None = None

    @property
    def schemas(self) -> Mapping[str, Mapping[str, Any]]:
        """One tool with one argument."""
        settings: SandboxCode = self.tool.target
        about = self.tool.limits.description
        code = {"type": "string", "description": f"the {settings.language} code"}
        parameters = {"type": "object", "properties": {"code": code}, "required": ["code"]}
        about = _ABOUT[settings.language] if about is None else about
        return {self.tool.name: schema(self.tool.name, about, parameters)}

    async def start(self, context: AgentWorkerContext) -> None:
        """Find the level of isolation that this machine allows; ``tools.start`` if it is less than asked for."""
        settings: SandboxCode = self.tool.target
        limits = attrs.asdict(settings) | {"seconds": self.tool.limits.seconds, "program": "main.py", "command": None}
        if settings.language == "shell":
            limits |= {"program": "main.sh", "command": ["sh"]}
        self._pool = UserCodePool(
            "jackfield_tools._code:Code", workers=self.tool.concurrency, method="run", keywords=limits,
            limits=WorkerLimits(memory_bytes=None, heartbeat_seconds=context.heartbeat_seconds), clock=context.clock,
            logs=f"{context.logs}-tool-{self.tool.name}" if context.logs else None,
        )  # fmt: skip
        self._folder = tempfile.mkdtemp(prefix="jackfield-tool-")
        os.chmod(self._folder, 0o711)  # code may run as another user
        try:
            await self._pool.start()
        except JackfieldError as error:
            raise self.cannot_start(error) from error
        task = {"probe": settings.isolation, "folder": self._folder}
        found = await self._pool.call({"task": task}, _PROBE_SECONDS, name="the probe of isolation")
        if found.status != "ok":
            raise self.cannot_start(found.error)
        self.level, reasons = found.value["level"], found.value["reasons"]
        if self.level is None:
            why = "; ".join(f"{level}: {reason}" for level, reason in reasons.items())
            fix = "allow it on this machine, or ask for less isolation"
            raise self.cannot_start(f"isolation {settings.isolation} is not allowed here: {why}", fix)
        weak = LEVELS.index(self.level) < LEVELS.index("filters")  # the network is open, for one
        text = "the tool %s runs code with isolation %s"
        logging.getLogger("jackfield").log(logging.WARNING if weak else logging.INFO, text, self.tool.name, self.level)

    def session(self, context: AgentContext, fields: Mapping[str, Any]) -> Session:
        """Return the session of a rollout; calls share nothing."""
        return _SandboxSession(self)

    async def run(self, code: str, seconds: float) -> ToolResult:
        """Run code, and return what it printed and how it ended."""
        assert self._pool is not None
        settings: SandboxCode = self.tool.target
        code = f"{settings.preamble}\n{code}" if settings.preamble else code
        task = {"code": code, "level": self.level, "folder": self._folder, "seconds": seconds}
        found = await self._pool.call({"task": task}, seconds + GRACE, name=f"the tool {self.tool.name}")
        if found.status == "timeout":
            raise DeadlineExceeded(f"waited {seconds:g} s for the tool {self.tool.name}")
        if found.status != "ok":
            raise Refused(f"{self.tool.name} failed: {found.error}")
        return _printed(found.value, seconds)

    async def close(self) -> None:
        """Kill the processes, and remove their files."""
        if self._pool is not None:
            await self._pool.close()
        folder, self._folder = self._folder, None
        if folder is not None:
            await asyncio.to_thread(remove_tree, Path(folder))


class _SandboxSession(Session):
    def __init__(self, source: SandboxSource) -> None:
        self._source = source

    async def call(self, name: str, arguments: Arguments, seconds: float) -> Any:
        if set(arguments) != {"code"} or not isinstance(arguments["code"], str):
            raise Refused(f"wrong arguments for {name}: it takes one argument, the text `code`")
        return await self._source.run(arguments["code"], seconds)


def _printed(reply: Mapping[str, Any], seconds: float) -> ToolResult:
    """Return what code printed; its errors are the model's to read."""
    ends = {"time": f"it ran longer than {seconds:g} s", "output": "it printed too much", "lost": "its process died"}
    status = reply["status"]
    problem = ends.get(reply["end"]) or (f"it ended with exit status {status}" if status else "")
    parts = [reply["out"].rstrip("\n"), reply["err"].strip(), f"[{problem}]" if problem else ""]
    return ToolResult(text="\n".join(part for part in parts if part), is_error=bool(problem))
