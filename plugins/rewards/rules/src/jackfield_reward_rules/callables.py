"""The reward agent ``callable``: a Python object of the process that started the run, which has no file of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import attrs
from attrs.validators import gt, le

from jackfield.abc.reward import RewardAgent, RewardContext
from jackfield.clock import Clock
from jackfield.errors import ConfigError, DeadlineExceeded, RewardError, RunError, some
from jackfield.sdk import option
from jackfield_reward_rules import _adapter
from jackfield_reward_rules.function import FunctionReward
from jackfield_user_code import WorkerResult, describe, is_async

_MOST_LATE = 16  #: calls that may still run after their deadline, before the reward refuses to make more
KNOWN: dict[str, Any] = {}  #: the objects that runs of this process use, by name


@contextlib.contextmanager
def registered(callables: Mapping[str, Any]) -> Iterator[None]:
    """Let runs of this process use objects by name; raise ``run.failed`` if another run uses one of the names."""
    for name, target in callables.items():
        if KNOWN.setdefault(name, target) is not target:
            what, fix = "another run of this process uses a reward of this name", "wait for it, or rename the function"
            raise RunError(what, where=f"reward {name}", fix=fix)
    try:
        yield
    finally:
        for name in callables:
            KNOWN.pop(name, None)


@attrs.frozen(kw_only=True)
class CallableRewardConfig:
    """Settings of a reward that is an object of this process."""

    path: str = option(help="The name under which jackfield.GRPO(reward=...) has given the object to this process.")
    method: str = option("compute_score", "The method of an instance that is called.")
    keywords: Mapping[str, Any] = option(factory=dict, help="Further keyword arguments of the function.")
    in_flight: int | None = option(
        None, "Calls at a time, for a coroutine function; null: 10000.", [gt(0), le(1_000_000)]
    )
    form: Literal["auto", "text", "messages"] = option(
        "auto",
        "Form of prompts and completions for TRL's functions; auto: texts if the record's column `prompt` is a text, "
        "as in TRL, else messages.",
    )
    try_first: bool = option(
        True,
        "Score the first task's own answer before anything is generated, and refuse a function that fails on it twice.",
    )
    version: str | None = option(None, "Version of the function, under which scores are cached; null: no cache.")


class CallableReward(FunctionReward):
    """A reward that calls a lambda, a closure, an instance or a function of a notebook, as ``function`` calls its own.

    The object has no file that a worker process could import, so it runs in a thread of this process. At a sample's
    deadline the score is a ``timeout``, but nothing can end the thread. What the object breaks is broken for the run: a
    crash, ``os._exit`` and exhausted memory end it.
    """

    def __init__(self, config: CallableRewardConfig, context: RewardContext) -> None:
        RewardAgent.__init__(self, config, context)
        if config.path not in KNOWN:
            what = "the reward is a Python object, and this process does not have it"
            expected = f"a run that a Python program started with it; here are {some(sorted(KNOWN))}"
            fix = "start the run from that program; or put the function into a file, and write "
            fix += f"reward: {{name: function, path: FILE.py:{config.path}}}"
            raise ConfigError(what, where="reward.path", expected=expected, found=config.path, fix=fix)
        self._pool: Any = ThreadPool(
            KNOWN[config.path], config.path, context.clock,
            method=config.method, keywords=config.keywords, in_flight=config.in_flight or 10_000,
        )  # fmt: skip
        self._getters = {}
        self._started = False

    @property
    def version(self) -> str | None:
        """Return the setting."""
        version: str | None = self.config.version
        return version


class _Thread:
    """A thread with an event loop, in which calls are made. It does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=f"reward {name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            self._ending = asyncio.Event()
            runner.run(self._ending.wait())

    def call(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> Future[WorkerResult]:
        return asyncio.run_coroutine_threadsafe(_call(function, arguments), self.loop)

    def end(self) -> None:
        """End the thread as soon as no call blocks it; calls that wait are cancelled."""
        self.loop.call_soon_threadsafe(lambda: self._ending.set())


async def _call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> WorkerResult:
    try:
        value = function(**arguments)
        return WorkerResult(status="ok", value=await value if inspect.isawaitable(value) else value)
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is not None and task.cancelling():
            raise
        return WorkerResult(status="failed", error=describe(error))
    except BaseException as error:  # SystemExit is the user's code's, too
        return WorkerResult(status="failed", error=describe(error))


@attrs.define(eq=False, slots=False)
class ThreadPool:
    """Calls a user's object in a thread, with the interface of :class:`jackfield_user_code.UserCodePool`.

    A sync function is called for one sample at a time, a coroutine function for ``in_flight`` samples. After a call
    that is late, the others are made in another thread.
    """

    _target: Any
    _name: str
    _clock: Clock
    _method: str = attrs.field(kw_only=True)
    _keywords: Mapping[str, Any] = attrs.field(kw_only=True)
    _in_flight: int = attrs.field(kw_only=True)
    about: dict[str, Any] = attrs.field(init=False, factory=dict)  #: what the adapter says, after :meth:`start`
    capacity: int = attrs.field(init=False, default=1)  #: calls at a time; known after :meth:`start`
    _functions: dict[str, Callable[..., Any]] = attrs.field(init=False, factory=dict)
    _thread: _Thread | None = attrs.field(init=False, default=None)
    _late: list[_Thread] = attrs.field(init=False, factory=list)
    _turns: asyncio.Semaphore = attrs.field(init=False)

    async def start(self) -> None:
        """Find out how the object is called; ``reward.function`` if it cannot be."""
        if self.about:
            return
        request = {"method": self._method, "keywords": self._keywords}
        module = sys.modules.get(getattr(self._target, "__module__", None) or "")
        try:
            self._functions, about = _adapter.adapt(self._target, module, request)
        except _adapter.Refused as refused:
            raise RewardError(refused.refusal.pop("message"), **refused.refusal) from refused
        several = any(map(is_async, self._functions.values()))
        self.capacity = self._in_flight if several else 1
        self._turns = asyncio.Semaphore(self.capacity)
        self.about = {**about, "functions": sorted(self._functions), "async": several}

    async def call(
        self, arguments: Mapping[str, Any], seconds: float, name: str = "", function: str = "call"
    ) -> WorkerResult:
        """Call a function when its turn comes. ``seconds`` is the deadline of its execution."""
        async with self._turns:
            self._late = [each for each in self._late if each.thread.is_alive()]
            if len(self._late) >= _MOST_LATE:
                return WorkerResult(status="failed", error=f"{len(self._late)} late calls of {self._name} still run")
            thread = self._thread = self._thread or _Thread(self._name)
            answer = thread.call(self._functions[function], arguments)
            try:
                who = f"{self._name} to answer for {name}"
                return await self._clock.wait_for(asyncio.wrap_future(answer), seconds, who)
            except DeadlineExceeded as error:
                if self._thread is thread:  # it may be blocked, so others get another one
                    self._thread = None
                    self._late.append(thread)
                    thread.end()
                return WorkerResult(status="timeout", error=f"{error}\nits thread may go on: nothing can end it")

    async def close(self) -> None:
        """Let the threads end."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None
