"""Tokenise text, detokenise streams, and the errors of clients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jackfield_openai.tokens import TokenTexts
from jackfield_tool_calls import Format, format_of

_UNFINISHED = "\ufffd"  # a character whose bytes are incomplete


class ServedTokenizer:
    """The tokenizer of a model folder. Only chats need a chat template; ``OSError`` if the folder has no tokenizer."""

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )

        self.texts = TokenTexts(self._tokenizer, self.decode)

    def encode_text(self, text: str, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Return the tokens of a bare text, including the tokenizer's initial ones."""
        return tuple(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **settings: Any
    ) -> tuple[int, ...]:
        """Return a conversation's tokens, up to where the model answers; raise what the template raises.

        ``settings`` are the template's own, and those of the library (``continue_final_message``).
        """
        chosen = {"add_generation_prompt": True, **settings, "tools": list(tools) or None, "return_dict": False}
        return tuple(self._tokenizer.apply_chat_template(list(messages), **chosen))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of tokens, as a rule without special ones."""
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(token_ids), **settings))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        return self.decode(token_ids, skip_special_tokens=False)

    @property
    def info(self) -> dict[str, Any]:
        """Return what clients with a remote tokenizer ask of it: its special tokens, and its chat template."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {"tokenizer_class": type(self._tokenizer).__name__} | {
            name: getattr(self._tokenizer, name, None) for name in names
        }

    @functools.cached_property
    def tool_format(self) -> Format | None:
        """Return the format in which the chat template shows tool calls; None: none that is known."""
        return shown_format(self)


#: A conversation in which a chat template shows its format of tool calls.
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
_CALLING = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "1", "tool_call_id": "abcdefghi", "name": "f"},
)


def shown_format(tokenizer: Any) -> Format | None:
    """Return the format of tool calls that a tokenizer's chat template shows; None: none that is known."""
    try:
        shown = tokenizer.decode(tokenizer.encode_chat(_CALLING, tools=[_TOOL]), False)
    except Exception:  # a template raises any type for messages that do not fit it
        return None
    return format_of(shown)


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
