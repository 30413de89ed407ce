"""The text of each token, and text that can change neither a terminal nor a page."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError

Decode = Callable[[Sequence[int]], str]
_HALF = "�"  #: what a tokenizer returns for a part of a letter
_WINDOW = 8  #: tokens before a token with which it is decoded
#: Signs that terminals obey or that hide or turn text: controls, also those of C1, directions, and half surrogates.
_HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """Return a text with visible signs in the place of those that are obeyed instead of shown."""
    return _HIDDEN.sub(lambda found: _sign(found[0]), text)


def plain_json(text: str) -> str:
    """Return JSON that has escapes for the same signs; half surrogates, which have no UTF-8, are replaced."""
    return _HIDDEN.sub(lambda found: _HALF if found[0] >= "\ud800" else f"\\u{ord(found[0]):04x}", text)


def _sign(char: str) -> str:
    code = ord(char)
    if code < 0x20:
        return chr(0x2400 + code)  # the pictures of controls: ␛
    return "␡" if code == 0x7F else _HALF if 0xD800 <= code < 0xE000 else f"⟦U+{code:04X}⟧"


def token_texts(ids: Sequence[int], decode: Decode | None) -> list[str]:
    """Return the text of each token, so that together they are the text of all.

    The tokens of a letter of several ones are empty but for the last. Without ``decode``, a text has the token's id.
    """
    if decode is None:
        return [f"⟦{each}⟧" for each in ids]
    texts, done = list[str](), 0  # tokens before ``done`` are shown
    for at in range(len(ids)):
        start = max(0, done - _WINDOW)
        before, now = decode(ids[start:done]), decode(ids[start : at + 1])
        if now.endswith(_HALF) and at + 1 < len(ids) and at - done < _WINDOW:
            texts.append("")
            continue
        texts.append(now[len(before) :] if now.startswith(before) else decode(ids[done : at + 1]))
        done = at + 1
    return texts


def load_decoder(name: str, *, chosen: bool) -> Decode | None:
    """Return the function that makes text of tokens, with special tokens, by a model's folder or name.

    If there is none, return None, or for a model that was ``chosen`` raise ``config.invalid-value``. Nothing is
    downloaded.
    """
    try:
        if (file := Path(name) / "tokenizer.json").is_file():
            from tokenizers import Tokenizer

            fast: Any = Tokenizer.from_file(str(file))
            return lambda ids: str(fast.decode(list(ids), skip_special_tokens=False))
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(name, local_files_only=True)
        return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
    except Exception as error:  # each library has its own
        if not chosen:
            return None
        expected, fix = "the folder of a model with its tokenizer", "name another one: --model FOLDER"
        found = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError("there is no tokenizer", where=name, expected=expected, found=found, fix=fix) from error
