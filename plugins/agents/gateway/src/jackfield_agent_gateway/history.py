"""Digests of conversations as clients send them, which tell equal ones.

Clients send back the model's answers changed in small ways: a content of null instead of none, the arguments of a tool
call written otherwise, the reasoning left out. Such histories are equal.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

import xxhash


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
