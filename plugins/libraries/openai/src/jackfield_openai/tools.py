"""Tools of a chat: which may be called, and the calls in an answer."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import attrs

from jackfield.abc.agent import ToolCall
from jackfield_openai.messages import read_tools
from jackfield_openai.text import refused
from jackfield_tool_calls import Format, Parsed, parse


@attrs.frozen
class ToolUse:
    """The tools that the template shows, and how the model may call them."""

    tools: tuple[dict[str, Any], ...] = ()
    parses: bool = False  #: whether calls are looked for in the answer
    forced: Mapping[str, Any] | None = None  #: JSON schema of an answer that has to be calls
    single: bool = False  #: at most one call

    def parsed(self, text: str, format: Format | None) -> Parsed:
        """Return the parts of an answer, a text with special tokens; each call has an id."""
        if self.forced is not None:
            found = _forced_calls(text)
        elif format is None:
            return Parsed(text, "", [], [])
        else:
            found = parse(text, format, tools=self.tools)
        calls = [attrs.evolve(call, id=call.id or f"call_{uuid.uuid4().hex[:24]}") for call in found.calls]
        return found._replace(calls=calls[:1] if self.single else calls)


def read_tool_use(tools: Any, choice: Any, parallel: bool | None) -> ToolUse:
    """Return what a body says of tools; ``ClientError`` for a wrong field.

    As in vLLM, ``none`` shows the tools and looks for no calls; ``required`` and a name need a grammar.
    """
    found, single = read_tools(tools), parallel is False
    name = _named(choice)
    if not found:
        if choice not in (None, "none", "auto"):
            raise refused("tool_choice", "nothing, where there are no tools", choice)
        return ToolUse()
    if choice == "none":
        return ToolUse(found)
    if choice in (None, "auto"):
        return ToolUse(found, parses=True, single=single)
    chosen = [tool["function"] for tool in found if name is None or tool["function"]["name"] == name]
    if not chosen:
        raise refused("tool_choice", "the name of one of the tools", name)
    calls = [_call_schema(function) for function in chosen]
    schema: dict[str, Any] = {
        "type": "array",
        "minItems": 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
    }
    if single or name is not None:
        schema["maxItems"] = 1
    return ToolUse(found, parses=True, forced=schema, single=single)


def _named(choice: Any) -> str | None:
    if choice in (None, "auto", "none", "required"):
        return None
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise refused("tool_choice", "auto, none, required or a function", choice)
    return name


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a call. Its arguments are those that the tool names, unless the tool says otherwise."""
    parameters = {"type": "object", **(function.get("parameters") or {})}
    if "properties" in parameters:
        parameters.setdefault("additionalProperties", False)
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _forced_calls(text: str) -> Parsed:
    """Return the calls of an answer to ``required``; one that max_tokens has cut is text."""
    try:
        found, _ = json.JSONDecoder().raw_decode(text.strip())
        calls = [ToolCall(id="", name=each["name"], arguments=each["parameters"]) for each in found]
    except (ValueError, KeyError, TypeError):
        return Parsed(text, "", [], ["the calls were cut"])
    return Parsed("", "", calls, [])
