"""Calls a user's function for some records, in a worker process. It needs only the standard library."""

from __future__ import annotations

import asyncio
import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_ACCEPTED = "a record (a dict), a list of records, or None"


def adapt(target: Any, module: Any, request: Mapping[str, Any]) -> tuple[dict[str, Callable[..., Any]], dict[str, Any]]:
    """Return the function ``call``, which gets records and returns for each ``[records, None]`` or ``[None, why]``."""
    function: Any = target() if inspect.isclass(target) else target

    def call(records: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        return [_called(function, record) for record in records]

    return {"call": call}, {}


def _called(function: Callable[..., Any], record: Mapping[str, Any]) -> list[Any]:
    try:
        value = function(record)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        found = [] if value is None else [value] if isinstance(value, dict) else value
        if not isinstance(found, list | tuple) or not all(isinstance(each, dict) for each in found):
            return [None, f"it returned {type(value).__name__} {value!r}"[:300] + f"; expected {_ACCEPTED}"]
        json.dumps(found, allow_nan=False)  # else the whole answer could not be sent
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return [None, f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"]
    return [list(found), None]
