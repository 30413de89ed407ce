"""What clients of a served model ask beyond the rollout contract: penalties, biases, grammars, likeliest tokens.

A run never asks for it: its log-probabilities are of the model's own distribution. So it is no part of the contract,
but of requests that an endpoint makes in the replica's process. Order: grammar, ``logit_bias``, ``min_tokens``,
penalties, and then the contract's temperature and filters. Log-probabilities are of the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

import attrs

from jackfield.abc.rollout import GenerateChunk, GenerateRequest, GenerateResult

Likeliest: TypeAlias = tuple[tuple[int, float], ...]  #: token ids and log-probs, the likeliest first
#: a prompt's token: its log-prob at temperature 1, its rank (1: the likeliest), and the likeliest tokens in its place
PromptToken: TypeAlias = tuple[float, int, Likeliest]


@attrs.frozen
class Grammar:
    """What a whole answer has to match: a JSON schema (as JSON text) or a regular expression."""

    kind: Literal["json", "regex"]
    text: str


@attrs.frozen(kw_only=True)
class Shaping:
    """Changes of the logits, and what an answer tells beside its tokens. The defaults change nothing."""

    frequency_penalty: float = 0.0  #: is subtracted for each time that a token was generated
    presence_penalty: float = 0.0  #: is subtracted once for each token that was generated
    repetition_penalty: float = 1.0  #: divides positive logits, and multiplies others, of tokens in prompt and answer
    logit_bias: Mapping[int, float] = attrs.field(factory=dict)  #: is added, by token id
    min_tokens: int = 0  #: nothing ends an answer before
    grammar: Grammar | None = None
    top_log_probs: int = 0  #: number of likeliest tokens to tell for each token
    prompt_log_probs: bool = False  #: tell the same of the prompt's tokens, except the first

    @property
    def wanted(self) -> frozenset[str]:
        """Return the names of the fields that are not neutral."""
        return frozenset(name for name in FIELDS if getattr(self, name) != getattr(NEUTRAL, name))


NEUTRAL = Shaping()
PENALTIES = ("frequency_penalty", "presence_penalty", "repetition_penalty")
FIELDS = frozenset(attrs.fields_dict(Shaping))


@attrs.frozen(kw_only=True)
class ShapedRequest(GenerateRequest):
    """A request with a shaping, for servers that name its fields in ``RelayServer.shaping``."""

    shaping: Shaping


@attrs.frozen(kw_only=True)
class ShapedChunk(GenerateChunk):
    """A chunk with what the shaping asks to tell."""

    likeliest: tuple[Likeliest, ...] = ()  #: for each token; empty: not asked for
    prompt: tuple[PromptToken, ...] = ()  #: of the prompt from its second token on, in the first chunk


@attrs.frozen(kw_only=True)
class ShapedResult(GenerateResult):
    """A result with what the shaping asks to tell, as in a :class:`ShapedChunk`."""

    likeliest: tuple[Likeliest, ...] = ()
    prompt: tuple[PromptToken, ...] = ()


def shaping_of(request: GenerateRequest) -> Shaping:
    """Return what a request asks beyond the contract."""
    return request.shaping if isinstance(request, ShapedRequest) else NEUTRAL
