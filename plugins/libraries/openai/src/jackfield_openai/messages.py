"""Messages of a chat, by OpenAI's rules.

Each role has its fields; ``content`` is a text or a list of text parts. Only an assistant's may be null, or missing,
where it calls tools. ``reasoning_content`` and ``reasoning`` are what the field's servers add to an assistant's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_INVALID = "invalid_value"  #: OpenAI's code


class ClientError(Exception):
    """What a client did wrong, in OpenAI's words.

    Args:
        message: for people.
        code: OpenAI's (``invalid_value``).
        param: the field of the body.
        status: of HTTP.
    """

    def __init__(self, message: str, code: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status


def refused(name: str, expected: str, found: Any, code: str = _INVALID) -> ClientError:
    """A bad field of a body."""
    return ClientError(f"{name} cannot be served: expected {expected}; found {repr(found)[:200]}", code, name)


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
    """Refuse a message that OpenAI refuses.

    Raises:
        ClientError: naming the field, as ``messages[0].content``.
    """
    if not isinstance(message, Mapping):
        raise refused(path, "an object", message, "invalid_type")
    role = _text(message, "role", path)
    if role not in _FIELDS:
        raise refused(f"{path}.role", "one of " + ", ".join(_FIELDS), role)
    for name in message.keys() - {"role", "content", "name", *_FIELDS[role]}:
        raise ClientError(f"a message of the role {role} has no {name!r}", "unknown_parameter", f"{path}.{name}")
    for name in _NEEDED.get(role, ()):
        _text(message, name, path)
    if message.get("name") is not None:
        _text(message, "name", path)
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
        if _text(part, "type", place) != "text":
            raise refused(f"{place}.type", "text: nothing else is served", part["type"])
        _text(part, "text", place)


def _check_call(call: Any, path: str) -> None:
    if not isinstance(call, Mapping):
        raise refused(path, "an object", call, "invalid_type")
    _text(call, "id", path)
    if _text(call, "type", path) != "function":
        raise refused(f"{path}.type", "function", call["type"])
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise _missing(f"{path}.function") if function is None else refused(f"{path}.function", "an object", function)
    for name in ("name", "arguments"):
        _text(function, name, f"{path}.function")


def _text(value: Mapping[str, Any], name: str, path: str) -> str:
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
