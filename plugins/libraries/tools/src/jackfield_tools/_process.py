"""What runs in a process of a tool's function."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from typing import Any

import attrs

from jackfield.errors import ConfigError
from jackfield_tools.schemas import describe, load
from jackfield_tools.sources import as_result


class Function:
    """The function, loaded once."""

    def __init__(self, target: str, name: str, description: str | None) -> None:
        self._error: str | None = None
        try:
            self._function = load(target, name)
            self._signature = describe(self._function, name, target, description)
        except ConfigError as error:
            self._error = str(error)

    def run(self, task: dict[str, Any] | None) -> dict[str, Any]:
        """Return the schema, or call the function."""
        if task is None:
            return {"error": self._error} if self._error else {"schema": self._signature.schema}
        try:
            arguments = self._signature.read(task)
        except ValueError as error:
            return {"refused": f"wrong arguments for {self._signature.name}: {error}"}
        try:
            value = self._function(**arguments)
            if inspect.isawaitable(value):
                value = asyncio.run(_awaited(value))
        except BaseException as error:  # of any kind: it is the user's code
            traceback.print_exc()  # to the log of this process
            return {"refused": _told(self._signature.name, error)}
        return {"result": attrs.asdict(as_result(value))}


def _told(name: str, error: BaseException) -> str:
    if isinstance(error, Exception):
        return f"{name} raised {type(error).__name__}: {error}"
    return f"{name} failed: it raised {type(error).__name__} {error}".strip()


async def _awaited(value: Any) -> Any:
    return await value
