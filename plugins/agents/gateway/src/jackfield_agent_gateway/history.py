"""Conversations as clients send them: one form for the chat template, and a digest that tells equal ones.

Clients send back the model's answers changed in small ways: a content of null instead of none, the arguments of a tool
call written otherwise, the reasoning left out. Such histories are equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash

from jackfield_openai.text import check_message, refused

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
    given = {name: value for name, value in message.items() if value is not None and name not in _IGNORED}
    if given.get("role") == "assistant" and not given.get("tool_calls"):
        given.pop("tool_calls", None)
        given.setdefault("content", "")
    seen = _images(given, path) if images and given.get("role") != "assistant" else []
    parts = given.get("content")
    others = [part for part in parts or () if part not in seen]
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
    return tuple(dict(tool) for tool in tools)


def digests(begin: str, messages: Iterable[Any]) -> list[str]:
    """Return a digest of the conversation after each message; ``begin`` is what it begins with."""
    return list(itertools.accumulate(messages, after, initial=begin))[1:]


def after(digest: str, message: Mapping[str, Any]) -> str:
    """Return the digest of a conversation to which a message is added."""
    content = message.get("content") or ""
    if message["role"] == "assistant":  # clients strip answers
        content = content.strip()
    calls = digest_of(called) if (called := message.get("tool_calls")) else ""
    essence = (digest, message["role"], content, calls, message.get("tool_call_id"), message.get("name"))
    return _hash(repr(essence))


def digest_of(value: Any) -> str:
    """Return a digest of a JSON value."""
    return _hash(json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False))


def _hash(text: str) -> str:
    return str(xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogatepass")))
