"""Bodies of clients' requests, converted to requests of the rollout contract.

Beside OpenAI's fields there are those of vLLM: sampling (``top_k``, ``min_p``, ``repetition_penalty``, ``min_tokens``),
``chat_template_kwargs``, ``structured_outputs``, ``return_token_ids``, a prompt of token ids. A field that is not
supported is refused, unless its value has no effect. A null is the same as no field.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeVar, cast

import attrs
from attrs.validators import ge, gt, le

from jackfield.abc.rollout import SamplingParams
from jackfield.errors import RolloutError
from jackfield.sdk import option, structure
from jackfield_huggingface.shaping import Grammar, Shaping
from jackfield_openai.grammars import read_grammar
from jackfield_openai.messages import read_messages
from jackfield_openai.text import ClientError, ServedTokenizer, refused
from jackfield_openai.tools import ToolUse, read_tool_use

_COMPLETION_TOKENS = 16  #: OpenAI's default of completions
UNBOUNDED = 2**31 - 1  #: the server ends at the model's length
_MOST_CHOICES = 128  #: OpenAI's, as are the next two
_MOST_STOPS = 4
_HOTTEST = 2.0
_TINY = 1e-9  #: keeps the likeliest token alone
_INT64 = 2**63

#: Fields that have no effect on the answer.
_NOTES = frozenset({"user", "metadata", "store", "safety_identifier", "prompt_cache_key", "service_tier", "request_id"})

#: Fields that are not supported, with their values that have no effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "detokenize": (None, True),
    "function_call": (None, "none"),
    "functions": (None, []),
    "include_reasoning": (None, True),
    "include_stop_str_in_output": (None, False),
    "length_penalty": (None, 1),
    "modalities": (None, ["text"]),
    "prediction": (None,),
    "priority": (None, 0),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_FLOATS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_PENALTY = 2.0  #: the largest, as OpenAI's
_BIAS = 100.0
_TOP = 20  #: the most tokens to tell in a place


class Readable(Protocol):
    """What :func:`read_body` makes of JSON: a class of attrs."""

    neutral: ClassVar[Mapping[str, tuple[Any, ...]]]  #: see :data:`NEUTRAL`

    def check(self) -> None:
        """Refuse fields that do not go together."""


B = TypeVar("B", bound=Readable)


@attrs.frozen(kw_only=True)
class StreamOptions:
    """The options of a streamed answer."""

    include_usage: bool = False
    include_obfuscation: bool = False  #: never added


@attrs.frozen(kw_only=True)
class Body(ABC):
    """The fields that both kinds of requests have."""

    model: str | None = None
    n: int | None = option(None, validator=[ge(1), le(_MOST_CHOICES)])
    temperature: float | None = option(None, validator=[ge(0), le(_HOTTEST)])
    top_p: float | None = option(None, validator=[ge(0), le(1)])
    top_k: int | None = option(None, validator=[ge(-1), le(UNBOUNDED)])
    min_p: float | None = option(None, validator=[ge(0), le(1)])
    frequency_penalty: float | None = option(None, validator=[ge(-_PENALTY), le(_PENALTY)])
    presence_penalty: float | None = option(None, validator=[ge(-_PENALTY), le(_PENALTY)])
    repetition_penalty: float | None = option(None, validator=[gt(0), le(_PENALTY)])
    logit_bias: Mapping[str, float] | None = None
    min_tokens: int | None = option(None, validator=[ge(0), le(UNBOUNDED)])
    prompt_logprobs: int | None = option(None, validator=[ge(0), le(_TOP)])
    response_format: Mapping[str, Any] | None = None
    structured_outputs: Mapping[str, Any] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None  #: token ids and weight versions beside the text
    return_tokens_as_token_ids: bool | None = None  #: ``token_id:7`` in place of texts of tokens
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
        self.shaping()

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

    @property
    def top_log_probs(self) -> int:
        """Return how many of the likeliest tokens the answer has for each token."""
        return 0

    @property
    def echoes(self) -> bool:
        """Return whether the answer begins with the prompt."""
        return False

    def grammar(self) -> Grammar | None:
        """Return what a whole answer has to match."""
        return read_grammar(self.response_format, self.structured_outputs)

    def shaping(self) -> Shaping:
        """Return what is asked beyond the rollout contract."""
        least = self.min_tokens or 0
        if least > self.most_tokens:
            raise refused("min_tokens", f"at most max_tokens = {self.most_tokens}", least)
        return Shaping(
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=_bias(self.logit_bias),
            min_tokens=least,
            grammar=self.grammar(),
            top_log_probs=max(self.top_log_probs, self.prompt_logprobs or 0),
            prompt_log_probs=self.prompt_logprobs is not None or (self.echoes and self.wants_log_probs),
        )

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
    max_tokens: int | None = option(None, validator=[ge(0), le(UNBOUNDED)])
    logprobs: int | None = option(None, validator=[ge(0), le(_TOP)])
    echo: bool | None = None
    add_special_tokens: bool | None = None  #: those with which the tokenizer begins a text; true, if not given

    @property
    def wants_log_probs(self) -> bool:
        return self.logprobs is not None

    @property
    def top_log_probs(self) -> int:
        return self.logprobs or 0

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def only_prompt(self) -> bool:
        """Return whether the answer has no tokens of its own."""
        return self.max_tokens == 0

    @property
    def most_tokens(self) -> int:
        if self.only_prompt and not self.echoes:
            raise refused("max_tokens", "at least 1; or 0 with echo", 0)
        return _COMPLETION_TOKENS if self.max_tokens is None else max(self.max_tokens, 1)

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

    def _tokens(self, prompt: Any, tokenizer: ServedTokenizer) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tokenizer.encode_text(prompt, self.add_special_tokens is not False)
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            return tuple(prompt)
        raise refused("prompt", "a text, token ids, or a list of either", prompt)


@attrs.frozen(kw_only=True)
class ChatBody(Body):
    """The body of ``/v1/chat/completions``."""

    messages: list[Any]
    max_tokens: int | None = option(None, validator=[ge(1), le(UNBOUNDED)])
    max_completion_tokens: int | None = option(None, validator=[ge(1), le(UNBOUNDED)])
    logprobs: bool | None = None
    top_logprobs: int | None = option(None, validator=[ge(0), le(_TOP)])
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None  #: for the chat template, as are the next ones
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    chat: ClassVar[bool] = True

    @property
    def wants_log_probs(self) -> bool:
        return bool(self.logprobs)

    @property
    def top_log_probs(self) -> int:
        if self.top_logprobs and not self.logprobs:
            raise refused("top_logprobs", "nothing, where logprobs is not true", self.top_logprobs)
        return self.top_logprobs or 0

    @property
    def tool_use(self) -> ToolUse:
        """Return the tools, and how they may be called."""
        return read_tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def grammar(self) -> Grammar | None:
        found, use = super().grammar(), self.tool_use
        if found is not None and use.parses:
            what = "nothing beside tools that may be called: an answer cannot be both"
            raise refused("response_format", what, found.text, "unsupported_parameter")
        return found if use.forced is None else Grammar("json", json.dumps(use.forced))

    @property
    def most_tokens(self) -> int:
        given = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return UNBOUNDED if given is None else given

    @property
    def prompt_count(self) -> int:
        return 1

    def prompts(self, tokenizer: ServedTokenizer) -> list[tuple[int, ...]]:
        """Return the rendered conversation as the only prompt; raise if OpenAI's rules or the template refuse it."""
        messages, tools = read_messages(self.messages), self.tool_use.tools
        try:
            return [tokenizer.encode_chat(messages, tools, **self._template)]
        except Exception as error:  # a template raises any type for messages that do not fit it
            text = f"the chat template does not take the messages: {error}"
            raise ClientError(text, "invalid_value", "messages") from error

    @property
    def _template(self) -> dict[str, Any]:
        """Return the settings of the chat template."""
        goes_on = bool(self.continue_final_message)
        if goes_on and self.add_generation_prompt:
            raise refused("continue_final_message", "nothing, where add_generation_prompt is true", True)
        found = {**(self.chat_template_kwargs or {})}
        for name in found.keys() & {"tools", "tokenize", "return_dict", "chat_template", "conversation"}:
            raise refused(f"chat_template_kwargs.{name}", "a setting of the template", found[name])
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
        if goes_on:
            found |= {"continue_final_message": True, "add_generation_prompt": False}
        elif self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found


def read_body(cls: type[B], data: Any) -> B:
    """Structure a body; ``ClientError`` for a field that is unsupported or out of range."""
    if not isinstance(data, Mapping):
        raise refused("the body", "a JSON object", data)
    for name, neutral in cls.neutral.items():
        if name in data and data[name] not in neutral:
            raise refused(name, f"nothing, or {neutral[-1]!r}: it is not served", data[name], "unsupported_parameter")
    needed = {each.name for each in attrs.fields(cast(Any, cls)) if each.default is attrs.NOTHING}
    given = {
        name: value
        for name, value in data.items()
        if name not in _NOTES and name not in cls.neutral and (value is not None or name in needed)
    }
    for name in _FLOATS:  # a configuration's numbers may be texts, as YAML reads 1e-3
        if isinstance(given.get(name), str):
            raise refused(name, "a number", given[name], "invalid_type")
    body = structure(cls, given, error=RolloutError)
    body.check()
    return body


def _bias(given: Mapping[str, float] | None) -> dict[int, float]:
    found = {}
    for name, value in (given or {}).items():
        if not name.isdecimal() or not -_BIAS <= value <= _BIAS:
            raise refused("logit_bias", f"token ids with numbers from -{_BIAS:g} to {_BIAS:g}", {name: value})
        found[int(name)] = float(value)
    return found
