"""Tokenise text, detokenise streams, and check chat messages by OpenAI's rules.

Each role has its fields; ``content`` is a text or a list of text parts. Only an assistant's content may be null or
missing, if it calls tools. Servers of the field add ``reasoning_content`` and ``reasoning`` to assistant messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # a character whose bytes are incomplete


class ServedTokenizer:
    """The tokenizer of a model folder. Only chats need a chat template; ``OSError`` if the folder has no tokenizer."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a bare text, including the tokenizer's initial ones."""
        return tuple(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Return a conversation's tokens, up to where the model answers; raise what the template raises."""
        found = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return tuple(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """The text of one answer, decoded piece by piece from token ids.

    A piece is released once later tokens cannot change it: characters wait for their last byte, and a possible
    beginning of a stop string waits until it is decided. The stop string itself is not part of the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens whose text is released; those before _begin no longer matter
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens; return the text that is final now."""
        self._ids.extend(token_ids)
        known = self._decode(self._ids[self._begin : self._end])
        text = self._decode(self._ids[self._begin :])
        if text.endswith(_UNFINISHED):
            return ""
        self._begin, self._end = self._end, len(self._ids)
        return self._release(text[len(known) :], last=False)

    def finish(self) -> str:
        """Return the rest of the text."""
        known = self._decode(self._ids[self._begin : self._end])
        return self._release(self._decode(self._ids[self._begin :])[len(known) :], last=True)

    def _release(self, new: str, last: bool) -> str:
        if self._stopped:
            return ""
        text = self._held + new
        found = [place for string in self._stop if (place := text.find(string)) >= 0]
        if found:
            self._stopped = True
            return text[: min(found)]
        kept = 0 if last else max((_overlap(text, string) for string in self._stop), default=0)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _overlap(text: str, string: str) -> int:
    """Return how many characters at the end of ``text`` are the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)


_INVALID = "invalid_value"  #: OpenAI's code


class ClientError(Exception):
    """A client's mistake, with OpenAI's code (``invalid_value``) and the field of the body."""

    def __init__(
        self, message: str, code: str, param: str | None = None, status: int = 400, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.message, self.code, self.param, self.status = message, code, param, status
        self.retry_after = retry_after  #: seconds after which the same request may succeed


def refused(name: str, expected: str, found: Any, code: str = _INVALID) -> ClientError:
    """Return the error of a bad field of a body."""
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
    """Refuse a message that OpenAI refuses; ``ClientError`` names the field, as ``messages[0].content``."""
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
