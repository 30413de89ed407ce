"""What parsers share: the result that they fill, JSON inside of text, and the types of arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import attrs

from jackfield.abc.agent import ToolCall

#: The parameters' schemas by tool and parameter.
Schemas: TypeAlias = Mapping[str, Mapping[str, Any]]

_DEEPEST = 64  #: levels of arguments


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is no number")


# models put line breaks into strings
_DECODER = json.JSONDecoder(strict=False, parse_constant=_no_number)
_SHOWN = 120  #: characters of a bad call in a message
_ARGUMENTS = ("arguments", "parameters")


@attrs.define
class Found:
    """What a parser has found so far."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = attrs.field(factory=list)
    problems: list[str] = attrs.field(factory=list)

    def refuse(self, what: str, text: str) -> None:
        """Note a call that cannot be read."""
        text = text.strip()
        shown = text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
        self.problems.append(f"a tool call cannot be read: {what}: {shown}")

    def add(self, name: Any, arguments: Any, text: str, id: Any = "") -> None:
        """Note a call, if it has a name and an object of arguments, which may be a text of JSON."""
        if not isinstance(name, str) or not name.strip():
            self.refuse("it has no name", text)
            return
        if isinstance(arguments, str):
            read = read_json(arguments or "{}")
            if isinstance(read, str):
                self.refuse(f"its arguments: {read}", text)
                return
            arguments = read[0]
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            self.refuse("its arguments are no object", text)
            return
        if problem := _no_json(arguments):
            self.refuse(problem, text)
            return
        self.calls.append(ToolCall(name=name.strip(), arguments=dict(arguments), id=id if isinstance(id, str) else ""))

    def add_object(self, value: Any, text: str) -> None:
        """Note a call that is an object with a name and arguments, as most families write it."""
        if not isinstance(value, Mapping):
            self.refuse("it is no object", text)
            return
        inner = value.get("function")
        call = inner if isinstance(inner, Mapping) else value
        arguments = next((call[name] for name in _ARGUMENTS if name in call), None)
        name = call.get("name", inner if isinstance(inner, str) else None)
        self.add(name, arguments, text, value.get("id", ""))


def _no_json(value: Any) -> str:
    """Return why a value is no JSON; empty if it is."""
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _DEEPEST:
            return f"it has more than {_DEEPEST} levels"
        for each in level:
            names = list(each) if isinstance(each, dict) else []
            if not isinstance(each, dict | list | str | int | float | None) or not all(type(n) is str for n in names):
                return f"{type(each).__name__} is no type of JSON"
            if isinstance(each, float) and not math.isfinite(each):
                return f"{each} is no number"
        inner = (each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list))
        level = [each for values in inner for each in values]
    return ""


def read_json(text: str, place: int = 0) -> tuple[Any, int] | str:
    """Return the JSON value that begins at a place, and where it ends; or what is wrong with it."""
    while place < len(text) and text[place].isspace():
        place += 1
    if place >= len(text):
        return "it is not finished"
    try:
        return _DECODER.raw_decode(text, place)
    except ValueError as error:
        cut = getattr(error, "pos", 0) >= len(text.rstrip()) or "Unterminated string" in str(error)
        return "it is not finished" if cut else f"it is not JSON ({error})"
    except RecursionError:
        return "it is nested too deeply"


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> Schemas:
    """Return the parameters' schemas of tools in OpenAI's form."""
    found: dict[str, Mapping[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping):
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            found[str(function.get("name", ""))] = properties if isinstance(properties, Mapping) else {}
    return found


def typed(text: str, schema: Any) -> Any:
    """Return an argument that is plain text with the type of its schema; without one, JSON where it is valid."""
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string":
        return text
    try:
        value = json.loads(text, strict=False, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return text
    allowed = {kinds} if isinstance(kinds, str) else set(kinds) if isinstance(kinds, list) else set()
    return text if "string" in allowed and not isinstance(value, str | None) and not _fits(value, allowed) else value


def _fits(value: Any, allowed: set[str]) -> bool:
    names = {bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    name = names.get(type(value), "")
    return name in allowed or (name == "integer" and "number" in allowed)
