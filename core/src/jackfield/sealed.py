"""JSON objects that carry a digest of themselves, so that damage is found before they are parsed.

``seal('{"step": 3}')`` is ``{"step": 3, "digest": "…"}``: 32 hexadecimal digits, the xxh3_128 of the text before. In a
chain each text's digest is also of the digest of the one before it.
"""

from __future__ import annotations

import json
from typing import Any

import xxhash

__all__ = ["seal", "seal_of", "unseal"]

_KEY = b', "digest": "'
_DIGITS = 32
_LENGTH = len(_KEY) + _DIGITS + len('"}')


def seal(text: str, after: str = "") -> str:
    """A JSON object's text, with its digest as the last entry.

    Args:
        text: of an object that is not empty.
        after: the digest of the text before it in a chain.
    """
    return f'{text[:-1]}{_KEY.decode()}{_digest(after, text.encode())}"}}'


def seal_of(content: bytes) -> str:
    """The digest that a sealed text says it has."""
    return content[-_DIGITS - 2 : -2].decode("ascii", errors="replace")


def unseal(content: bytes, after: str = "") -> dict[str, Any]:
    """The object that was sealed, without its digest.

    Raises:
        ValueError: it is not what was sealed.
    """
    body = content[:-_LENGTH] + b"}"
    if content != body[:-1] + _KEY + _digest(after, body).encode() + b'"}':
        raise ValueError("the contents are not those that were written: their digest is another one")
    found: dict[str, Any] = json.loads(body)
    return found


def _digest(after: str, content: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(after.encode() + content)
