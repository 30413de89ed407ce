"""Programs that talk to the model: a function, a command, or one that is started elsewhere."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import json
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import attrs

from jackfield.abc.agent import AgentContext, AgentWorkerContext
from jackfield.errors import AgentError, ConfigError, DeadlineExceeded
from jackfield_agent_gateway.rollouts import Rollout
from jackfield_agent_gateway.server import Gateway, read_reward
from jackfield_agent_gateway.settings import ProgramConfig
from jackfield_openai.text import ClientError
from jackfield_user_code import UserCodePool, WorkerLimits
from jackfield_user_code.commands import CommandLimits, run_command

_NO_LIMIT = 10.0**6  #: seconds of a program without a deadline


class Programs:
    """Runs the programs of one worker's rollouts."""

    def __init__(self, config: ProgramConfig, context: AgentWorkerContext) -> None:
        self._config, self._context = config, context
        self._pool: UserCodePool | None = None
        self._function: Callable[..., Awaitable[Any]] | None = None

    async def start(self) -> None:
        """Load the function, if the program is one; ``worker.start`` or ``config.invalid-value`` if that fails."""
        config, context = self._config, self._context
        if config.call is None:
            return
        if not config.process:
            self._function = await asyncio.to_thread(_load, config.call)
            return
        limits = WorkerLimits(memory_bytes=config.memory_bytes, heartbeat_seconds=context.heartbeat_seconds)
        self._pool = UserCodePool(
            config.call, limits=limits, clock=context.clock, workers=config.workers, logs=context.logs
        )
        await self._pool.start()

    async def close(self) -> None:
        """End all processes."""
        if self._pool is not None:
            await self._pool.close()

    async def run(self, rollout: Rollout, context: AgentContext, gateway: Gateway) -> None:
        """Run the program of a rollout to its end, and note its reward; ``agent.program`` if it fails."""
        if self._config.external:
            await self._external(rollout, context)
            return
        task, address = json.loads(json.dumps(dict(rollout.fields), default=str)), gateway.address
        if self._config.command is not None:
            value = await self._command(rollout, context, task, address)
        elif self._function is not None:
            try:
                value = await self._function(task=task, base_url=address, api_key=rollout.key)
            except Exception as error:
                raise _failed(rollout, f"{type(error).__name__}: {error}") from error
        else:
            value = await self._call(rollout, context, task, gateway)
        self._note(rollout, value)

    async def _call(self, rollout: Rollout, context: AgentContext, task: Any, gateway: Gateway) -> Any:
        assert self._pool is not None

        def arguments() -> dict[str, Any]:
            return {"task": task, "base_url": gateway.address, "api_key": rollout.key}

        async def again() -> dict[str, Any]:
            context.event("restart", turns=rollout.recording.turns)
            await gateway.restart(rollout)
            return arguments()

        seconds = min(context.seconds_left, _NO_LIMIT)
        result = await self._pool.call(arguments(), seconds, rollout.name, again=again)
        if result.status == "timeout":
            raise AgentError("the program was late", code="agent.program", where=_where(rollout), found=result.error)
        if result.status != "ok":
            raise _failed(rollout, result.error or result.status)
        return result.value

    async def _command(self, rollout: Rollout, context: AgentContext, task: Any, address: str) -> Any:
        config, folder = self._config, context.folder()
        assert config.command is not None
        text = json.dumps(task)
        task_file, reward_file = folder / "task.json", folder / "reward.json"
        await asyncio.to_thread(task_file.write_text, text, encoding="utf-8")
        env = {
            **os.environ,
            "OPENAI_BASE_URL": address,
            "OPENAI_API_KEY": rollout.key,
            "JACKFIELD_TASK_FILE": str(task_file),
            "JACKFIELD_REWARD_FILE": str(reward_file),
            **config.env,
        }
        limits = CommandLimits(memory_bytes=config.memory_bytes)
        logs = self._context.logs
        log = None if logs is None else Path(f"{logs}-command.log")
        name = f"rollout {rollout.name}"
        result = await run_command(config.command, stdin=text.encode(), env=env, limits=limits, log=log, name=name)
        if result.code != 0:
            raise _failed(rollout, f"exit code {result.code}: {result.told}")
        if config.reward_from == "last_line":
            told = next((line for line in reversed(result.output.splitlines()) if line.strip()), "")
        else:
            told = await asyncio.to_thread(_read, reward_file)
        if not told:
            return None
        try:
            return json.loads(told)
        except ValueError as error:
            expected = "a number, or a JSON object with reward and metrics"
            raise _no_reward(rollout, expected, told[:200]) from error

    async def _external(self, rollout: Rollout, context: AgentContext) -> None:
        """Wait until the program says that it has finished, or makes no more requests."""
        idle = self._config.idle_seconds
        while not rollout.finished.is_set():
            quiet = context.clock.time() - rollout.last if rollout.is_claimed and not rollout.active else 0.0
            if quiet >= idle:
                return
            try:
                waiting = f"a program to finish rollout {rollout.name}"
                await context.clock.wait_for(rollout.finished.wait(), idle - quiet, waiting)
            except DeadlineExceeded:
                continue

    def _note(self, rollout: Rollout, value: Any) -> None:
        if value is None:
            return
        try:
            reward, metrics = read_reward(value)
        except ClientError as error:
            expected = "nothing, a number, or an object with no other fields than reward and metrics"
            raise _no_reward(rollout, expected, value) from error
        rollout.metrics |= metrics
        if reward is not None:
            rollout.reward = reward
            rollout.rewarded.set()


def _load(target: str) -> Callable[..., Awaitable[Any]]:
    """Import a coroutine function; ``config.invalid-value`` if there is none."""
    place, _, name = target.rpartition(":")
    details: dict[str, Any] = {"where": "agent.program.call", "expected": "folder/file.py:function"}
    try:
        if place.endswith(".py"):
            path = Path(place).expanduser().resolve()
            spec = importlib.util.spec_from_file_location(f"jackfield_program_{path.stem}", path)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(place)
        function = getattr(module, name)
    except Exception as error:
        raise ConfigError(
            "the program cannot be imported", found=f"{type(error).__name__}: {error}", **details
        ) from error
    if not inspect.iscoroutinefunction(function):
        fix = "make it async, or let it have processes of its own (agent.program.process: true)"
        raise ConfigError("a program in the worker blocks it unless it is async", found=target, fix=fix, **details)
    return cast(Callable[..., Awaitable[Any]], function)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8").strip() if path.is_file() else ""


def _where(rollout: Rollout) -> str:
    return f"task {rollout.task}"


def _failed(rollout: Rollout, found: str) -> AgentError:
    fix = "try the program against any OpenAI-compatible address; agent.on_failure: keep trains on what it did"
    return AgentError("the program failed", code="agent.program", where=_where(rollout), found=found, fix=fix)


def _no_reward(rollout: Rollout, expected: str, found: Any) -> AgentError:
    details: Mapping[str, Any] = {"where": _where(rollout), "expected": expected, "found": repr(found)[:200]}
    return AgentError("the program's reward cannot be read", code="agent.program", **details)


@attrs.frozen
class Shared:
    """What the rollouts of a worker share."""

    gateway: Any
    programs: Programs
