"""Text to tokens, and tokens to text while they come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # a character of which not all bytes are there


class ServedTokenizer:
    """The tokenizer of a model folder. A chat template is asked for only by chats.

    Args:
        path: of the folder.
        trust_remote_code: run Python code that the folder brings.

    Raises:
        OSError: there is none.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, local_files_only=True
        )

    def encode_text(self, text: str) -> tuple[int, ...]:
        """Tokens of a bare text, with those that the tokenizer begins one with."""
        return tuple(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Tokens of a conversation, up to where the model has to answer. Raises what the template raises."""
        found = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
        return tuple(found)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of some tokens, without special ones."""
        return str(
            self._tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


class TextStream:
    """The text of one answer, piece by piece.

    A piece is given out once later tokens cannot change it: characters wait for their last byte, and what may turn out
    to be the beginning of a stop string waits until it is none. The stop string itself is not part of the text.

    Args:
        decode: token ids to text.
        stop: the request's stop strings.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._begin = self._end = 0  # tokens whose text is out; those before _begin are too far back to matter
        self._held = ""
        self._stopped = False

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that is certain now."""
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
    """How many characters at the end of ``text`` are the beginning of ``string``."""
    longest = min(len(text), len(string) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(string[:size])), 0)
