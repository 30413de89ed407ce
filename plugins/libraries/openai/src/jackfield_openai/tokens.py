"""The texts and bytes of single tokens, as OpenAI tells them: a token may be a part of a character.

OpenAI writes bytes that are no characters as ``\\xe2\\x80``, and in completions with ``bytes:`` before them.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")  #: a token of one byte, in vocabularies of SentencePiece
_SPACE = "\u2581"  #: their sign for a space


def _byte_signs() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2's table)."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(hidden)}


class TokenTexts:
    """The bytes and texts of a tokenizer's tokens, each computed once."""

    def __init__(self, tokenizer: Any, decode: Callable[[list[int]], str]) -> None:
        self._tokenizer, self._decode = tokenizer, decode
        self._added = dict(getattr(tokenizer, "added_tokens_decoder", {}))
        self._special = frozenset(tokenizer.all_special_ids)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        described = json.loads(backend.to_str()) if backend is not None else {}
        decoder = json.dumps(described.get("decoder"))
        self._signs = _byte_signs() if '"ByteLevel"' in decoder else None
        self._spaces = _SPACE in decoder or '"Metaspace"' in decoder or '"\\u2581"' in decoder
        self.bytes = functools.cache(self._bytes)

    def is_special(self, token: int) -> bool:
        """Return whether a token is no part of a text."""
        return token in self._special

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token; a special token's are those of its name."""
        if token in self._added:
            return str(self._added[token]).encode()
        name = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(name, str):  # an id without a token: a model may have more ids than its tokenizer
            return b""
        if self._signs is not None and all(sign in self._signs for sign in name):
            return bytes(self._signs[sign] for sign in name)
        if self._spaces:
            found = _BYTE.match(name)
            return bytes([int(found[1], 16)]) if found else name.replace(_SPACE, " ").encode()
        return self._decode([token]).encode()

    def text(self, token: int, prefix: str = "") -> str:
        """Return the text of a token; ``prefix`` stands before bytes that are no characters."""
        raw = self.bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return prefix + "".join(f"\\x{byte:02x}" for byte in raw)


class Offsets:
    """Where each token of a text begins, in characters; a character of several tokens begins at its first."""

    def __init__(self, texts: TokenTexts) -> None:
        self._texts = texts
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of(self, token_ids: Iterable[int]) -> list[int]:
        """Return the offsets of further tokens."""
        found = []
        for token in token_ids:
            found.append(self._length)
            if not self._texts.is_special(token):
                self._length += len(self._decoder.decode(self._texts.bytes(token)))
        return found
