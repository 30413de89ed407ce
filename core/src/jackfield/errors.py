"""The tree of all exceptions that Jackfield raises.

Each exception has a ``code``, which ``docs/reference/errors.md`` explains, and says what went wrong, where, what was
expected, what was found and how to fix it.
"""

from __future__ import annotations

import difflib
import functools
import os
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_DETAILS = ("where", "expected", "found", "fix")


class JackfieldError(Exception):
    """The base class of all errors.

    The message says what went wrong, in one sentence without a full stop. The code is one of
    ``docs/reference/errors.md``; each class has a default. ``where`` is the place: a file and line, a path in the
    configuration, a plugin, a sample. ``expected`` and ``found`` are values or states; ``fix`` is what the reader can
    do.
    """

    default_code = "run.failed"

    def __init_subclass__(cls, code: str | None = None) -> None:
        cls.default_code = code or cls.default_code

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        where: object = None,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.code = code or self.default_code
        self.message, self.where, self.expected, self.found, self.fix = message, where, expected, found, fix
        super().__init__(message)

    def __str__(self) -> str:
        place = re.escape(self.where) if isinstance(self.where, str) else ""
        shown = self.where is None or (place and re.search(rf"(?<!\w){place}(?!\w)", self.message))
        head = self.message if shown else f"{self.message} at {self.where}"
        details = ((name, getattr(self, name)) for name in _DETAILS[1:])
        lines = [f"{name}: {value}".replace("\n", "\n    ") for name, value in details if value is not None]
        return "\n  ".join([f"[{self.code}] {head}", *lines])

    def __reduce__(self) -> tuple[Any, ...]:
        details: dict[str, Any] = {name: getattr(self, name) for name in ("code", *_DETAILS)}
        return functools.partial(type(self), **details), (self.message,)

    def as_dict(self) -> dict[str, Any]:
        """Return the error as JSON-ready fields, as ``--json`` prints them."""
        values = {name: getattr(self, name) for name in _DETAILS}
        details = {name: None if value is None else str(value) for name, value in values.items()}
        return {"code": self.code, "message": self.message, **details}


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return a hint at the known name that is closest to a wrong one; empty if none is close."""
    lower = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower(), lower, n=1)
    return f" (did you mean '{lower[close[0]]}'?)" if close else ""


def some(names: Sequence[str], most: int = 4) -> str:
    """Return the first ``most`` names, or "none", and the number of the others."""
    rest = len(names) - most
    return (", ".join(names[:most]) or "none") + (f" and {rest} more" if rest > 0 else "")


def described(error: BaseException) -> str:
    """Describe an exception in one line, with the file and line that raised it, in user code if possible."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    libraries = (os.path.dirname(__file__) + os.sep, "<frozen ", *installed)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(libraries)] or frames
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    text = text.encode(errors="backslashreplace").decode()  # no message can carry a lone surrogate
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


def error_fields(error: BaseException) -> dict[str, Any]:
    """Return an error as plain values that can be sent to another process."""
    if isinstance(error, JackfieldError):
        return {"class": type(error).__name__, **error.as_dict()}
    return {"class": None, "message": f"{type(error).__name__}: {error}"}


def rebuilt_error(fields: Mapping[str, Any], where: str) -> JackfieldError:
    """Return the error from the :func:`error_fields` that another process, named by ``where``, sent."""
    kind = globals().get(str(fields.get("class")))
    if not (isinstance(kind, type) and issubclass(kind, JackfieldError)):
        return RunError(f"{where} raised {fields.get('message')}", where=where)
    details = {name: fields.get(name) for name in _DETAILS}
    return kind(str(fields.get("message")), code=fields.get("code"), **details)


class ConfigError(JackfieldError, code="config.invalid-value"):
    """A configuration file or an override is wrong."""


class PluginError(JackfieldError, code="plugin.requirement"):
    """A plugin cannot be used."""


class PluginNotFound(PluginError, code="plugin.not-found"):
    """No plugin of that name is installed."""


class DataError(JackfieldError, code="data.malformed"):
    """A task file, a tokenizer or a template is wrong."""


class EngineError(JackfieldError, code="engine.failed"):
    """A training engine refused or failed."""


class RolloutError(JackfieldError, code="rollout.failed"):
    """A rollout server refused or failed."""


class AgentError(JackfieldError, code="agent.failed"):
    """An agent loop broke its contract or failed."""


class RewardError(JackfieldError, code="reward.failed"):
    """A reward agent broke its contract or failed."""


class OperatorError(JackfieldError, code="operator.failed"):
    """An operator of a data pipeline broke its contract or failed."""


class QueueError(JackfieldError, code="queue.invalid"):
    """The TransferQueue refused a request."""


class RpcError(JackfieldError, code="rpc.malformed"):
    """A message between processes was refused, or a call could not be delivered."""


class WeightsError(JackfieldError, code="weights.transfer"):
    """A weight synchronisation was lost, stale or corrupt."""


class RunError(JackfieldError, code="run.failed"):
    """A run cannot start, continue or resume."""


class WorkerLost(RunError, code="worker.died"):
    """A worker died and its work was lost."""


class DeadlineExceeded(JackfieldError, code="deadline"):
    """A wait reached its deadline."""
