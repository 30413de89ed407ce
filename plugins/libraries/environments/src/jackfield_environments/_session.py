"""One environment and its calls, in plain values. It needs only the standard library and runs in any process."""

from __future__ import annotations

import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

Plain = dict[str, Any]

WRONG = "wrong result"  #: the key of an answer of a process that says what an environment returned
RESET_MARK = "-- an episode begins --"  #: a line in the output of a process

_PACKAGES = {"openenv": "openenv-core"}  #: names of packages that are not the module's


class Missing(ImportError):
    """A package that an environment needs is not installed."""

    def __init__(self, error: ModuleNotFoundError) -> None:
        module = str(error.name).partition(".")[0]
        package = _PACKAGES.get(module, module.replace("_", "-"))
        super().__init__(f"the environment needs the package {package!r}")
        fix = f"pip install {package}, or set environment.python to an interpreter that has it"
        self.refusal = {
            "message": f"the environment needs the package {package!r}",
            "code": "plugin.requirement",
            "where": "environment.name",
            "found": str(error),
            "fix": fix,
        }


class WrongResult(TypeError):
    """An environment returned something else than it should."""


class Session:
    """An environment whose results are checked. Its methods return values, or awaitables of them."""

    def __init__(self, make: Callable[..., Any], settings: Mapping[str, Any]) -> None:
        try:
            self.environment = make(**settings)
        except ModuleNotFoundError as error:
            raise Missing(error) from error
        if missing := [name for name in ("reset", "step") if not callable(getattr(self.environment, name, None))]:
            raise TypeError(f"{type(self.environment).__qualname__} has no method {missing[0]!r}")
        parameters = inspect.signature(self.environment.reset).parameters.values()
        self._takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters)
        self._takes = {each.name for each in parameters if each.kind in (each.KEYWORD_ONLY, each.POSITIONAL_OR_KEYWORD)}

    def reset(self, seed: int | None, fields: Mapping[str, Any]) -> Any:
        """Begin an episode. A field of the task is passed on if ``reset`` has a parameter of its name."""
        given = {**fields, "seed": seed}
        given = given if self._takes_all else {name: given[name] for name in self._takes if name in given}
        return _then(self.environment.reset(**given), _of_reset)

    def step(self, action: str) -> Any:
        """Take an action."""
        return _then(self.environment.step(action), _of_step)

    def close(self) -> Any:
        """Close the environment."""
        close = getattr(self.environment, "close", None)
        return None if close is None else _then(close(), lambda _: None)


def adapt(target: Any, module: Any, request: Mapping[str, Any]) -> tuple[dict[str, Callable[..., Any]], Plain]:
    """Make the environment of a worker process, and return the functions that can be called."""
    if not callable(target):
        raise TypeError(f"an environment is a class, or a function that makes one, not {type(target).__qualname__}")
    session = Session(target, request["keywords"])
    # as lambdas: calls of a process run one at a time, also if the environment's methods are coroutine functions
    functions: dict[str, Callable[..., Any]] = {
        "reset": lambda seed, fields: _without_traceback(_marked(session.reset), seed, fields),
        "step": lambda action: _without_traceback(session.step, action),
    }
    functions["close"] = lambda: session.close()
    return functions, {}


def _marked(reset: Callable[..., Any]) -> Callable[..., Any]:
    """Return a ``reset`` that first notes in the output of the process that an episode begins."""

    def marked(*arguments: Any) -> Any:
        with suppress(Exception):  # the user's code may have closed or replaced its streams
            sys.stdout.flush()
            sys.stderr.flush()
        with suppress(OSError):
            os.write(1, f"{RESET_MARK}\n".encode())
        return reset(*arguments)

    return marked


def _without_traceback(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; return a wrong result's message as a value, as an error would get a traceback of this file."""

    async def later(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except WrongResult as error:
            return {WRONG: str(error)}

    try:
        value = function(*arguments)
    except WrongResult as error:
        return {WRONG: str(error)}
    return later(value) if inspect.isawaitable(value) else value


def _then(value: Any, convert: Callable[[Any], Any]) -> Any:
    async def later(awaitable: Awaitable[Any]) -> Any:
        return convert(await awaitable)

    return later(value) if inspect.isawaitable(value) else convert(value)


def _of_reset(value: Any) -> Plain:
    observation, info = value if isinstance(value, tuple) and len(value) == 2 else (value, {})
    _check(isinstance(observation, str), "reset", "a text, or (text, info)", observation)
    _check(isinstance(info, Mapping), "reset", "a mapping as info", info)
    return {"observation": observation, "info": dict(info)}


def _of_step(value: Any) -> Plain:
    expected = "(observation, reward, terminated, truncated, info)"
    _check(isinstance(value, tuple) and len(value) == 5, "step", expected, value)
    observation, reward, terminated, truncated, info = value
    _check(isinstance(observation, str), "step", "a text as observation", observation)
    number = _number(reward)
    _check(number is not None and math.isfinite(number), "step", "a finite number as reward", reward)
    _check(isinstance(info, Mapping), "step", "a mapping as info", info)
    made = {"observation": observation, "reward": number, "terminated": bool(terminated)}
    return {**made, "truncated": bool(truncated), "info": dict(info)}


def _number(value: Any) -> float | None:
    """Return a number as float; a text is none, whatever it says."""
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):  # the last of an array with many elements
        return None


def _check(right: bool, method: str, expected: str, found: Any) -> None:
    if not right:
        raise WrongResult(f"{method} returned {str(found)[:200]!r} ({type(found).__name__}), expected {expected}")
