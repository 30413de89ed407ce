"""Settings of an environment, and what an environment returns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import attrs
from attrs.validators import ge, gt, min_len, optional

from jackfield.errors import ConfigError
from jackfield.sdk import option

_ADAPTERS = Path(__file__).with_name("adapters")

#: The built-in environments and adapters, and the file and name of each.
BUILT_IN: Mapping[str, str] = {
    "household": f"{Path(__file__).with_name('household.py')}:Household",
    **{
        name: f"{_ADAPTERS / name}_adapter.py:make"
        for name in ("gymnasium", "openenv", "reasoning_gym", "textarena", "textworld", "verifiers")
    },
}


class Environment(Protocol):
    """What an environment has. Methods may be coroutine functions; ``close`` may be left out.

    ``reset`` also gets those fields of the task of which it has parameters, and may return the text alone.
    """

    def reset(self, *, seed: int | None = None) -> tuple[str, Mapping[str, Any]]:
        """Begin an episode; return the observation, and information for the program."""

    def step(self, action: str) -> tuple[str, float, bool, bool, Mapping[str, Any]]:
        """Take an action; return observation, reward, terminated, truncated and information."""

    def close(self) -> None:
        """Free what the environment has opened."""


@attrs.frozen(kw_only=True)
class Observation:
    """The beginning of an episode."""

    text: str
    info: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Step:
    """The result of an action."""

    text: str  #: the observation
    reward: float = 0.0
    terminated: bool = False  #: the episode has ended by its rules
    truncated: bool = False  #: the episode was cut, by a limit of steps for example
    info: Mapping[str, Any] = attrs.field(factory=dict)

    @property
    def ended(self) -> bool:
        """Return whether no further action can be taken."""
        return self.terminated or self.truncated


@attrs.frozen(kw_only=True)
class EnvironmentConfig:
    """An environment, how it is run, and its limits."""

    name: str = option(
        help="`household`, `gymnasium`, `reasoning_gym`, `textarena`, `textworld`, `openenv`, `verifiers`, or a class "
        "of your own: `file.py:Class` or `module:Class`.",
        validator=min_len(1),
    )
    settings: Mapping[str, Any] = option(help="Keyword arguments of the class.", factory=dict)
    run: Literal["process", "thread", "inline"] = option(
        "process",
        "`process`: each object in a process of its own, which is killed if it hangs; `thread`: in a thread, which "
        "cannot be killed; `inline`: in the event loop, for coroutine functions, or code that takes microseconds.",
    )
    size: int = option(16, "Most objects that are open at a time in each worker; they are opened as needed.", gt(0))
    seconds: float = option(30.0, "Deadline of one `reset` or `step`.", gt(0.0))
    start_seconds: float = option(60.0, "Deadline of making one object.", gt(0.0))
    wait_seconds: float = option(600.0, "Longest wait for an object that others use.", gt(0.0))
    retries: int = option(
        1, "How often a `reset` that failed is tried again with another object; a `step` never is.", ge(0)
    )
    memory_bytes: int | None = option(4 * 2**30, "Address space of one process; null: unlimited.", optional(gt(0)))
    python: str | None = option(
        None, "Interpreter of the processes, which needs nothing of Jackfield; null: the one of the worker."
    )

    def __attrs_post_init__(self) -> None:
        """Refuse a name that is no environment, and an interpreter without processes."""
        place, colon, name = self.name.rpartition(":")
        if self.name not in BUILT_IN and not (colon and place and name.isidentifier()):
            expected = f"{', '.join(sorted(BUILT_IN))}, file.py:Class or module:Class"
            raise _refused("name", f"there is no environment {self.name!r}", expected)
        if place.endswith(".py") and not Path(place).expanduser().is_file():
            raise _refused("name", f"there is no file {place}", "a file with the environment's class")
        if self.python is not None and self.run != "process":
            raise _refused("python", "another interpreter needs processes", "run: process")

    @property
    def target(self) -> str:
        """The file or module, and the name in it."""
        return BUILT_IN.get(self.name, self.name)


def _refused(key: str, message: str, expected: str) -> ConfigError:
    return ConfigError(message, where=f"environment.{key}", expected=expected, fix="correct it")
