"""Bodies of clients' requests, converted to requests of the rollout contract, and answers in OpenAI's form.

Beside OpenAI's fields there are the usual extensions: ``top_k``, ``min_p``, ``ignore_eos``, ``stop_token_ids``,
``return_token_ids``, and a prompt of token ids. A field that is not supported is refused, unless its value has no
effect.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import attrs
from attrs.validators import ge, le

from jackfield.abc.rollout import GenerateChunk, SamplingParams
from jackfield.errors import RolloutError
from jackfield.sdk import option, structure
from jackfield_openai.text import ClientError, ServedTokenizer, TextStream, check_message, refused

_COMPLETION_TOKENS = 16  #: OpenAI's default of completions
_UNBOUNDED = 2**31 - 1  #: the server ends at the model's length
_MOST_CHOICES = 128  #: OpenAI's, as are the next two
_MOST_STOPS = 4
_HOTTEST = 2.0
_TINY = 1e-9  #: keeps the likeliest token alone
_INT64 = 2**63

#: Fields that have no effect on the answer.
_NOTES = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier"})

#: Fields that are not supported, with their values that have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
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

B = TypeVar("B", bound="Body")


@attrs.frozen(kw_only=True)
class StreamOptions:
    """The options of a streamed answer."""

    include_usage: bool = False


@attrs.frozen(kw_only=True)
class Body(ABC):
    """The fields that both kinds of requests have."""

    model: str | None = None
    n: int | None = option(None, validator=[ge(1), le(_MOST_CHOICES)])
    temperature: float | None = option(None, validator=[ge(0), le(_HOTTEST)])
    top_p: float | None = option(None, validator=[ge(0), le(1)])
    top_k: int | None = option(None, validator=[ge(-1), le(_UNBOUNDED)])
    min_p: float | None = option(None, validator=[ge(0), le(1)])
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  #: token ids and weight versions beside the text
    minimum_weight_version: int | None = option(None, validator=ge(0))

    chat: ClassVar[bool] = False
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL  #: see there

    @property
    def choices(self) -> int:
        """Return the number of answers for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Return the texts that end an answer."""
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if not all(given) or len(given) > _MOST_STOPS:
            raise refused("stop", f"at most {_MOST_STOPS} texts that are not empty", self.stop)
        return given

    def check(self) -> None:
        """Refuse parameters that no server supports and fields without effect, naming the field."""
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "nothing, where stream is not true", self.stream_options)
        self.sampling(0)

    @property
    @abstractmethod
    def wants_log_probs(self) -> bool:
        """Return whether the answer has log-probabilities."""

    @property
    @abstractmethod
    def most_tokens(self) -> int:
        """Return the maximum number of tokens of an answer."""

    @property
    @abstractmethod
    def prompt_count(self) -> int:
        """Return the number of prompts."""

    @abstractmethod
    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt."""

    def sampling(self, choice: int) -> SamplingParams:
        """Return the sampling parameters of one of the answers."""
        given = {
            "temperature": self.temperature,
            "top_p": None if self.top_p is None else max(self.top_p, _TINY),
            "top_k": None if self.top_k is None else max(self.top_k, 0),  # -1, too, means all
            "min_p": self.min_p,
            "ignore_eos": self.ignore_eos,
            "seed": None if self.seed is None else (self.seed + choice + _INT64) % (2 * _INT64) - _INT64,
        }
        try:
            return SamplingParams(
                max_new_tokens=self.most_tokens,
                stop=self.stop_strings,
                stop_token_ids=tuple(self.stop_token_ids or ()),
                **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            )
        except RolloutError as error:
            raise refused(str(error.where).removeprefix("sampling."), str(error.expected), error.found) from error


@attrs.frozen(kw_only=True)
class CompletionBody(Body):
    """The body of ``/v1/completions``."""

    prompt: Any
    max_tokens: int | None = option(None, validator=[ge(1), le(_UNBOUNDED)])
    logprobs: int | None = None

    @property
    def wants_log_probs(self) -> bool:
        if self.logprobs not in (None, 0):
            raise refused("logprobs", "0 (the drawn tokens' own) or null", self.logprobs)
        return self.logprobs is not None

    @property
    def most_tokens(self) -> int:
        return _COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def _prompts(self) -> list[Any]:
        prompt = self.prompt
        if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int)):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise refused("prompt", "a text, token ids, or a list of either", prompt)
        return prompt

    @property
    def prompt_count(self) -> int:
        return len(self._prompts)

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        return [self._tokens(each, tokenizer) for each in self._prompts]

    @staticmethod
    def _tokens(prompt: Any, tokenizer: ServedTokenizer) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tokenizer.encode_text(prompt)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return tuple(prompt)
        raise refused("prompt", "a text, token ids, or a list of either", prompt)


@attrs.frozen(kw_only=True)
class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    messages: list[Any]
    max_tokens: int | None = option(None, validator=[ge(1), le(_UNBOUNDED)])
    max_completion_tokens: int | None = option(None, validator=[ge(1), le(_UNBOUNDED)])
    logprobs: bool | None = None

    chat: ClassVar[bool] = True

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def most_tokens(self) -> int:
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return _UNBOUNDED if given is None else given

    @property
    def prompt_count(self) -> int:
        return 1

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        """Return the rendered conversation as the only prompt; raise if OpenAI's rules or the template refuse it."""
        if not self.messages:
            raise refused("messages", "at least one message", self.messages)
        for place, message in enumerate(self.messages):
            check_message(message, f"messages[{place}]")
        messages = [_plain(message) for message in self.messages]
        try:
            return [tokenizer.encode_chat(messages)]
        except Exception as error:  # a template raises any type for messages that do not fit it
            text = f"the chat template does not take the messages: {error}"
            raise ClientError(text, "invalid_value", "messages") from error


def read_body(cls: type[B], data: Any) -> B:
    """Structure a body; ``ClientError`` for a field that is unsupported or out of range."""
    if not isinstance(data, Mapping):
        raise refused("the body", "a JSON object", data)
    for name, neutral in cls.neutral.items():
        if name in data and data[name] not in neutral:
            raise refused(name, f"nothing, or {neutral[-1]!r}: it is not served", data[name], "unsupported_parameter")
    given = {name: value for name, value in data.items() if name not in _NOTES and name not in cls.neutral}
    for name in ("temperature", "top_p", "min_p"):  # a configuration's numbers may be texts, as YAML reads 1e-3
        if isinstance(given.get(name), str):
            raise refused(name, "a number", given[name], "invalid_type")
    body = structure(cls, given, error=RolloutError)
    body.check()
    return body


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Join the text parts of a message; templates need one text."""
    content = message.get("content")
    if not isinstance(content, list):
        return dict(message)
    return {**message, "content": "".join(part["text"] for part in content)}


class Choice:
    """One of the texts that a request asks for."""

    def __init__(self, index: int, prompt: tuple[int, ...], body: Body, tokenizer: ServedTokenizer) -> None:
        self.index = index
        self.prompt = prompt
        self.sampling = body.sampling(index)
        self.minimum_weight_version = body.minimum_weight_version
        self.chunks: list[GenerateChunk] = []
        self._body = body
        self._tells_log_probs = body.wants_log_probs
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.decode, body.stop_strings)
        self._offset = 0

    @property
    def completion_tokens(self) -> int:
        """Return the number of tokens that have come."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    def piece(self, chunk: GenerateChunk) -> dict[str, Any]:
        """Return a streamed choice with the content of a chunk."""
        self.chunks.append(chunk)
        text = self._text.feed(chunk.token_ids)
        if chunk.finish_reason is not None:
            text += self._text.finish()
        return self._choice("delta", text, [chunk])

    def whole(self) -> dict[str, Any]:
        """Return the complete choice."""
        text = "".join(self._text.feed(chunk.token_ids) for chunk in self.chunks) + self._text.finish()
        return self._choice("message", text, self.chunks)

    def _choice(self, chat_key: str, text: str, chunks: Sequence[GenerateChunk]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": self.index, "finish_reason": chunks[-1].finish_reason}
        if self._body.chat:
            choice[chat_key] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choice["logprobs"] = self._log_probs(chunks) if self._tells_log_probs else None
        if self._body.return_token_ids:
            choice["token_ids"] = [token for chunk in chunks for token in chunk.token_ids]
            choice["weight_versions"] = [version for chunk in chunks for version in chunk.weight_versions]
            if len(chunks) == len(self.chunks):
                choice["prompt_token_ids"] = list(self.prompt)
        return choice

    def _log_probs(self, chunks: Sequence[GenerateChunk]) -> dict[str, Any]:
        drawn = [pair for chunk in chunks for pair in zip(chunk.token_ids, chunk.log_probs, strict=True)]
        texts = [self._tokenizer.decode([token]) for token, _ in drawn]
        if self._body.chat:
            content = [
                {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
                for text, (_, value) in zip(texts, drawn, strict=True)
            ]
            return {"content": content, "refusal": None}
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [value for _, value in drawn],
            "top_logprobs": None,
            "text_offset": offsets,
        }


@attrs.frozen
class Answer:
    """The data that all choices of a request share."""

    body: Body
    model: str
    choices: list[Choice]
    id: str = attrs.field(factory=lambda: uuid.uuid4().hex)
    created: int = attrs.field(factory=lambda: int(time.time()))

    @property
    def public_id(self) -> str:
        """Return the id that clients see."""
        return f"{'chatcmpl' if self.body.chat else 'cmpl'}-{self.id}"

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""
        return {**self._head(""), "choices": [choice.whole() for choice in self.choices], "usage": self.usage()}

    def event(self, choices: list[dict[str, Any]], usage: bool = False) -> dict[str, Any]:
        """Return one event of a stream."""
        event = {**self._head(".chunk" if self.body.chat else ""), "choices": choices}
        return {**event, "usage": self.usage()} if usage else event

    def usage(self) -> dict[str, int]:
        """Count prompt and answer tokens; a prompt counts once for all of its answers."""
        prompt = sum(len(choice.prompt) for choice in self.choices) // self.body.choices
        completion = sum(choice.completion_tokens for choice in self.choices)
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _head(self, suffix: str) -> dict[str, Any]:
        kind = "chat.completion" if self.body.chat else "text_completion"
        return {"id": self.public_id, "object": kind + suffix, "created": self.created, "model": self.model}
