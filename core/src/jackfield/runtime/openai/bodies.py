"""What clients send, as requests of our contract.

Beside OpenAI's fields there are those by which the field's servers extend them: ``top_k``, ``min_p``, ``ignore_eos``,
``stop_token_ids``, ``return_token_ids``, and a prompt of token ids. What is not served is refused, unless it is the
value that changes nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import attrs

from jackfield.abc.rollout import SamplingParams
from jackfield.errors import RolloutError
from jackfield.runtime.openai.text import ServedTokenizer
from jackfield.structuring import structure

__all__ = ["Body", "ChatBody", "CompletionBody", "read_body"]

_COMPLETION_TOKENS = 16  #: OpenAI's default of completions
_UNBOUNDED = 2**31 - 1  #: the server ends at the model's length
_MOST_CHOICES = 256

#: Fields that say nothing about the answer.
_NOTES = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})

#: Fields that are not served, with the values that change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none"),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "parallel_tool_calls": (None, True, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "reasoning_effort": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
}


@attrs.frozen(kw_only=True)
class StreamOptions:
    """How an answer is streamed."""

    include_usage: bool = False


@attrs.frozen(kw_only=True)
class Body(ABC):
    """What both kinds of requests have."""

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  #: token ids and weight versions beside the text
    minimum_weight_version: int | None = None

    chat: ClassVar[bool] = False

    @property
    def choices(self) -> int:
        """Answers for each prompt."""
        count = 1 if self.n is None else self.n
        if not 1 <= count <= _MOST_CHOICES:
            raise refused("n", f"1 to {_MOST_CHOICES}", count)
        return count

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end an answer."""
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(given):
            raise refused("stop", "texts that are not empty", self.stop)
        return given

    @property
    @abstractmethod
    def wants_log_probs(self) -> bool:
        """Whether the answer tells log-probabilities."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """The longest answer."""

    @abstractmethod
    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        """Token ids of each prompt."""

    def sampling(self, choice: int) -> SamplingParams:
        """How tokens of one of the answers are drawn."""
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1, too, means all
            "min_p": self.min_p,
            "ignore_eos": self.ignore_eos,
            "seed": None if self.seed is None else self.seed + choice,
        }
        return SamplingParams(
            max_new_tokens=self.most_tokens,
            stop=self.stop_strings,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
        )


@attrs.frozen(kw_only=True)
class CompletionBody(Body):
    """Of ``/v1/completions``."""

    prompt: Any
    max_tokens: int | None = None
    logprobs: int | None = None

    @property
    def wants_log_probs(self) -> bool:
        if self.logprobs not in (None, 0):
            raise refused("logprobs", "0 (the drawn tokens' own) or null", self.logprobs)
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise refused("prompt", "a text, token ids, or a list of either", prompt)
        return [self._tokens(each, tokenizer) for each in prompt]

    @staticmethod
    def _tokens(prompt: Any, tokenizer: ServedTokenizer) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tokenizer.encode_text(prompt)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return tuple(prompt)
        raise refused("prompt", "a text, token ids, or a list of either", prompt)


@attrs.frozen(kw_only=True)
class ChatBody(Body):
    """Of ``/v1/chat/completions``."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None

    chat: ClassVar[bool] = True

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int:
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _UNBOUNDED if given is None else given

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        if not self.messages:
            raise refused("messages", "at least one message", self.messages)
        return [tokenizer.encode_chat([_plain(message) for message in self.messages])]


def read_body(cls: type[Body], data: Any) -> Body:
    """Structure a body.

    Raises:
        RolloutError: ``rollout.request`` for a field that is not served; those of ``structure``.
    """
    if not isinstance(data, Mapping):
        raise refused("the body", "a JSON object", data)
    for name, neutral in _NEUTRAL.items():
        if name in data and data[name] not in neutral:
            raise refused(name, f"nothing, or {neutral[-1]!r}: it is not served", data[name])
    given = {name: value for name, value in data.items() if name not in _NOTES and name not in _NEUTRAL}
    return structure(cls, given, error=RolloutError)


def refused(name: str, expected: str, found: Any) -> RolloutError:
    """A bad field of a body."""
    return RolloutError(
        f"{name} cannot be served", code="rollout.request", where=name, expected=expected, found=repr(found)[:200]
    )


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text parts are joined; templates want one text."""
    content = message.get("content")
    if not isinstance(content, Sequence) or isinstance(content, str):
        return dict(message)
    parts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise refused("messages", "contents that are texts", content)
    return {**message, "content": "".join(parts)}  # type: ignore[arg-type]
