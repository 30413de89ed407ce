"""Check chat messages and tools by OpenAI's rules, and convert them to the form for chat templates.

Each role has its fields; ``content`` is a text or a list of text parts. Only an assistant's content may be null or
missing, if it calls tools. Servers of the field add ``reasoning_content`` and ``reasoning`` to assistant messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jackfield_openai.text import ClientError, refused

_IGNORED = frozenset({"annotations", "refusal", "audio", "function_call", "provider_specific_fields"})
_ROLES = {"developer": "system"}  #: roles that chat templates call otherwise


def read_messages(messages: Any, images: bool = False) -> list[dict[str, Any]]:
    """Return checked messages in the form for chat templates; ``ClientError`` names what is wrong with one.

    ``images``: their contents may have images, which are ``data:`` addresses.
    """
    if not isinstance(messages, list) or not messages:
        raise refused("messages", "a list of at least one message", messages)
    return [_read(message, f"messages[{place}]", images) for place, message in enumerate(messages)]


def _read(message: Any, path: str, images: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refused(path, "an object", message, "invalid_type")
    kept = ("content",) if message.get("role") != "assistant" else ()  # which only an assistant may leave out
    given = {
        name: value for name, value in message.items() if name not in _IGNORED and (value is not None or name in kept)
    }
    if given.get("role") == "assistant" and not given.get("tool_calls"):
        given.pop("tool_calls", None)
        given.setdefault("content", "")
    seen = _images(given, path) if images and given.get("role") != "assistant" else []
    parts = given.get("content")
    others = [part for part in parts if part not in seen] if seen and isinstance(parts, list) else []
    check_message({**given, "content": others or ""} if seen else given, path)
    if isinstance(parts, list):
        given["content"] = parts if seen else "".join(part["text"] for part in parts)
    given["role"] = _ROLES.get(given["role"], given["role"])
    if "reasoning" in given:
        given.setdefault("reasoning_content", given.pop("reasoning"))
    if "tool_calls" in given:
        given.setdefault("content", "")
        given["tool_calls"] = [_call(call) for call in given["tool_calls"]]
    return given


def _images(message: Mapping[str, Any], path: str) -> list[Any]:
    """Return the parts of a message that are images; ``ClientError`` for one that is no ``data:`` address."""
    content = message.get("content")
    found = []
    for place, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, Mapping) or part.get("type") != "image_url":
            continue
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, Mapping) else image
        if not isinstance(url, str) or not url.startswith("data:"):
            expected = "the image itself as data:image/png;base64,…; nothing is downloaded"
            raise refused(f"{path}.content[{place}].image_url.url", expected, url)
        found.append(part)
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, which templates render as JSON."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = function["arguments"]
    return {"id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Return checked tools in OpenAI's form."""
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise refused("tools", "a list", tools, "invalid_type")
    for place, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or tool.get("type") != "function" or not function.get("name"):
            raise refused(f"tools[{place}]", "a function with a name", tool)
        if not isinstance(function["name"], str):
            raise refused(f"tools[{place}].function.name", "a text", function["name"], "invalid_type")
        if not isinstance(schema := function.get("parameters"), Mapping | None):
            raise refused(f"tools[{place}].function.parameters", "a JSON schema", schema, "invalid_type")
    return tuple(dict(tool) for tool in tools)


_CALLS = ("tool_calls", "function_call")
#: Fields beside role, content and name, by role.
_FIELDS: Mapping[str, tuple[str, ...]] = {
    "developer": (),
    "system": (),
    "user": (),
    "assistant": (*_CALLS, "refusal", "audio", "reasoning_content", "reasoning"),
    "tool": ("tool_call_id",),
    "function": (),
}
#: Fields that a role has to have.
_NEEDED: Mapping[str, tuple[str, ...]] = {"tool": ("tool_call_id",), "function": ("name",)}


def check_message(message: Any, path: str) -> None:
    """Refuse a message that OpenAI refuses; ``ClientError`` names the field, as ``messages[0].content``."""
    if not isinstance(message, Mapping):
        raise refused(path, "an object", message, "invalid_type")
    role = field_text(message, "role", path)
    if role not in _FIELDS:
        raise refused(f"{path}.role", "one of " + ", ".join(_FIELDS), role)
    for name in message.keys() - {"role", "content", "name", *_FIELDS[role]}:
        raise ClientError(f"a message of the role {role} has no {name!r}", "unknown_parameter", f"{path}.{name}")
    for name in _NEEDED.get(role, ()):
        field_text(message, name, path)
    if message.get("name") is not None:
        field_text(message, "name", path)
    for number, call in enumerate(_listed(message, "tool_calls", path)):
        _check_call(call, f"{path}.tool_calls[{number}]")
    if message.get("content") is None and any(message.get(name) for name in _CALLS):
        return
    _check_content(message, role, f"{path}.content")


def _check_content(message: Mapping[str, Any], role: str, path: str) -> None:
    if "content" not in message:
        raise _missing(path)
    content = message["content"]
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise refused(path, "a text, or a list of text parts", content, "invalid_type")
    if not content:
        raise refused(path, "one part at least", content)
    for number, part in enumerate(content):
        place = f"{path}[{number}]"
        if not isinstance(part, Mapping):
            raise refused(place, "an object", part, "invalid_type")
        if field_text(part, "type", place) != "text":
            raise refused(f"{place}.type", "text: nothing else is served", part["type"])
        field_text(part, "text", place)


def _check_call(call: Any, path: str) -> None:
    if not isinstance(call, Mapping):
        raise refused(path, "an object", call, "invalid_type")
    field_text(call, "id", path)
    if field_text(call, "type", path) != "function":
        raise refused(f"{path}.type", "function", call["type"])
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _missing(f"{path}.function") if function is None else refused(f"{path}.function", "an object", function)
    for name in ("name", "arguments"):
        field_text(function, name, f"{path}.function")


def field_text(value: Mapping[str, Any], name: str, path: str) -> str:
    """Return a field that has to be a text; ``path`` is the place of its object."""
    if name not in value:
        raise _missing(f"{path}.{name}")
    found = value[name]
    if not isinstance(found, str):
        raise refused(f"{path}.{name}", "a text", found, "invalid_type")
    return found


def _listed(value: Mapping[str, Any], name: str, path: str) -> list[Any]:
    found = value.get(name)
    if found is None:
        return []
    if not isinstance(found, list):
        raise refused(f"{path}.{name}", "a list", found, "invalid_type")
    if not found:
        raise refused(f"{path}.{name}", "one call at least", found)
    return found


def _missing(path: str) -> ClientError:
    return ClientError(f"{path} is missing", "missing_required_parameter", path)
