"""vLLM's ``/tokenize`` and ``/detokenize``: the tokens of a text or a conversation, and the text of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

from jackfield_openai.bodies import ChatBody
from jackfield_openai.text import ServedTokenizer, refused


@attrs.frozen(kw_only=True)
class TokenizeTextBody:
    """The body of ``/tokenize`` with a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool = True
    return_token_strs: bool | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check(self) -> None:
        """Do nothing: there is no wrong text."""


@attrs.frozen(kw_only=True)
class TokenizeChatBody(ChatBody):
    """The body of ``/tokenize`` with a conversation: the fields of a chat that are shown to the model."""

    return_token_strs: bool | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {"add_special_tokens": (None, False)}


@attrs.frozen(kw_only=True)
class DetokenizeBody:
    """The body of ``/detokenize``."""

    tokens: list[int]
    model: str | None = None

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    def check(self) -> None:
        """Refuse what is no token id."""
        if any(not 0 <= token < 2**31 for token in self.tokens):
            raise refused("tokens", "token ids", self.tokens)


def tokenized(body: TokenizeTextBody | TokenizeChatBody, tokenizer: ServedTokenizer) -> dict[str, Any]:
    """Return the tokens of a body and their number, and on request the text of each."""
    if isinstance(body, TokenizeTextBody):
        found = tokenizer.encode_text(body.prompt, body.add_special_tokens)
    else:
        (found,) = body.prompts(tokenizer)
    texts = [tokenizer.texts.text(token) for token in found] if body.return_token_strs else None
    return {"count": len(found), "tokens": list(found), "token_strs": texts}


def detokenized(body: DetokenizeBody, tokenizer: ServedTokenizer) -> str:
    """Return the text of tokens, with special ones."""
    return tokenizer.decode_all(body.tokens)
