"""A pool of environments, whose objects are reused by reset and replaced if they hang or fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

from jackfield.clock import Clock
from jackfield.errors import AgentError, PluginError, RunError
from jackfield_environments._hosts import Failed, Host, InlineHost, ProcessHost, ThreadHost, named
from jackfield_environments._session import Session
from jackfield_environments.loading import load, requirement
from jackfield_environments.settings import BUILT_IN, EnvironmentConfig, Observation, Step
from jackfield_user_code import UserCodePool, WorkerLimits, hold

_SESSION = Path(__file__).with_name("_session.py")


@attrs.define
class PoolCounts:
    """What a pool has done so far."""

    opened: int = 0  #: objects made
    replaced: int = 0  #: objects that hung or failed
    episodes: int = 0  #: resets that succeeded
    steps: int = 0


class EnvironmentPool:
    """Objects of one environment, each for one episode at a time.

    ``name`` is the holder's, for messages. ``logs`` is the path prefix of files that get the output of processes. An
    object is opened when an episode needs one and none is free; at most ``size`` of them exist.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        *,
        clock: Clock | None = None,
        name: str = "",
        logs: str | None = None,
        heartbeat_seconds: float = 30.0,
    ) -> None:
        self.config, self.counts, self._name = config, PoolCounts(), name
        self._clock = clock or Clock()
        self._free: list[Host] = []
        self._open: set[Host] = set()
        self._turns = asyncio.Semaphore(config.size)
        self._closed = False
        self._processes: UserCodePool | None = None
        if config.run == "process":
            limits = WorkerLimits(
                memory_bytes=config.memory_bytes,
                start_seconds=config.start_seconds,
                heartbeat_seconds=heartbeat_seconds,
            )
            options: dict[str, Any] = {} if config.python is None else {"python": config.python}
            options |= {"workers": config.size, "limits": limits, "clock": self._clock, "adapter": _SESSION}
            self._processes = UserCodePool(config.target, keywords=config.settings, logs=logs, **options)

    @property
    def is_open(self) -> int:
        """The number of objects that exist."""
        return len(self._open)

    async def start(self) -> None:
        """Open the first object, so that an environment that cannot be made is refused before a rollout.

        Raises:
            AgentError: ``agent.environment``, or ``plugin.requirement`` if a package is missing.
        """
        host = await self._take("the start")
        self._give(host)

    def episode(self, task: str = "", *, seconds: float | None = None) -> Episode:
        """Return an episode, which takes an object at its first reset. ``task`` names the user in messages."""
        return Episode(self, task, self.config.seconds if seconds is None else seconds)

    async def close(self) -> None:
        """Close all objects, also those that are in use. Idempotent."""
        self._closed = True
        free, self._free = self._free, []
        busy = self._open - set(free)
        self._open.clear()
        try:
            await asyncio.gather(*(host.close() for host in free), *(host.discard() for host in busy))
        finally:
            if self._processes is not None:
                await self._processes.close()

    # -- inside

    async def _take(self, task: str) -> Host:
        """Return a free object, or make one."""
        if self._closed:
            raise AgentError(f"the environments {self._shown} are closed", code="agent.environment", where=task or None)
        waiting = f"one of {self.config.size} environments {self._shown} to be free (environment.size)"
        await self._clock.wait_for(self._turns.acquire(), self.config.wait_seconds, waiting)
        try:
            return self._free.pop() if self._free else await self._make(task)
        except BaseException:
            self._turns.release()
            raise

    def _give(self, host: Host) -> None:
        self._free.append(host)
        self._turns.release()

    async def _drop(self, host: Host, error: AgentError | None) -> None:
        """End an object that must not be used again; with an error, warn about it."""
        if error is not None:
            self.counts.replaced += 1
            text = "%s (%s); another one takes its place: %s"
            logging.getLogger("jackfield").warning(text, error.message, error.where, error.found)
        self._open.discard(host)
        try:
            await host.discard()
        finally:
            self._turns.release()

    async def _make(self, task: str) -> Host:
        number = self.counts.opened
        self.counts.opened += 1
        host = await self._made(number, task)
        self._open.add(host)
        return host

    async def _made(self, number: int, task: str) -> Host:
        config, shown = self.config, self._of(number)
        if self._processes is not None:
            try:
                return ProcessHost(number, await hold(self._processes))
            except RunError as error:
                details: Any = {"where": error.where, "found": error.found, "fix": error.fix}
                if error.code == "plugin.requirement":
                    raise PluginError(error.message, **details) from error
                what = f"the environment {shown} cannot be made: {error.message}"
                raise AgentError(what, code="agent.environment", **details) from error
        make = load(config.target, "environment.name")
        host = None
        try:
            if config.run == "inline":
                return InlineHost(number, Session(make, config.settings), self._clock)
            host = ThreadHost(number, lambda: Session(make, config.settings), self._clock)
            await host.start(config.start_seconds, f"{shown} to be made")
        except Failed as error:
            assert host is not None
            await host.discard()
            raise self._refused(error.__cause__ or error, shown, task) from error
        except BaseException as error:
            if host is not None:
                await host.discard()
            if not isinstance(error, Exception):
                raise
            raise self._refused(error, shown, task) from error
        return host

    def _refused(self, error: BaseException, shown: str, task: str) -> Exception:
        missing = requirement(error)
        found = f"{type(error).__name__}: {error}"
        return missing or named(Failed("cannot be made", found), shown, task, "its constructor")

    @property
    def _shown(self) -> str:
        return self.config.name if self.config.name in BUILT_IN else Path(self.config.name).name

    def _of(self, number: int) -> str:
        return f"{self._shown} {number}{f' of {self._name}' if self._name else ''}"


class Episode:
    """One rollout's use of a pool: an object from the first reset to the release."""

    def __init__(self, pool: EnvironmentPool, task: str, seconds: float) -> None:
        self._pool, self._task, self._seconds = pool, task, seconds
        self._host: Host | None = None
        self.steps = 0  #: actions since the last reset
        self.total = 0.0  #: sum of their rewards
        self.ended = False  #: whether the environment has said that the episode is over

    @property
    def info(self) -> Mapping[str, Any]:
        """Return what the environment said for the program at the last call."""
        return self._info

    _info: Mapping[str, Any] = {}

    async def reset(self, *, seed: int | None = None, **fields: Any) -> Observation:
        """Begin again, with fields of the task; an object that fails is replaced, ``retries`` times.

        Raises:
            AgentError: ``agent.environment`` names environment, task and call.
            DeadlineExceeded: No object became free.
        """
        for left in range(self._pool.config.retries, -1, -1):
            if self._host is None:
                self._host = await self._pool._take(self._task)
            try:
                value = await self._call("reset", {"seed": seed, "fields": fields}, f"reset(seed={seed})")
                break
            except AgentError:
                if not left:
                    raise
        self.steps, self.total, self.ended, self._info = 0, 0.0, False, value["info"]
        self._pool.counts.episodes += 1
        return Observation(text=value["observation"], info=value["info"])

    async def step(self, action: str) -> Step:
        """Take an action.

        Raises:
            AgentError: ``agent.environment`` names environment, task and call; or the episode has ended.
        """
        if self._host is None or self.ended:
            found = "an episode that has ended" if self.ended else "no reset, or an environment that was replaced"
            what, fix = "an action needs an episode", "call reset first"
            where = self._task or None
            raise AgentError(what, code="agent.environment", where=where, expected="a reset", found=found, fix=fix)
        value = await self._call("step", {"action": action}, f"step({action[:80]!r})")
        self._pool.counts.steps += 1
        self.steps, self.total, self._info = self.steps + 1, self.total + value["reward"], value["info"]
        self.ended = value["terminated"] or value["truncated"]
        return Step(text=value.pop("observation"), **value)

    async def release(self) -> None:
        """Give the object back, for the next episode. Idempotent."""
        host, self._host = self._host, None
        if host is not None and host in self._pool._open:
            self._pool._give(host)

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.release()

    async def _call(self, method: str, arguments: Mapping[str, Any], call: str) -> Any:
        host = self._host
        assert host is not None
        shown = self._pool._of(host.number)
        try:
            return await host.call(method, arguments, self._seconds, f"{shown} to {call} for {self._task}")
        except Failed as failed:
            self._host = None
            error = named(failed, shown, self._task, call)
            await self._pool._drop(host, error)
            raise error from failed
        except BaseException:  # cancelled: the state of the object is unknown
            self._host = None
            with suppress(Exception):
                await self._pool._drop(host, None)
            raise
