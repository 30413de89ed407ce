"""Asks a language model: one that the run serves, or one at an OpenAI-compatible address."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import xxhash
from attrs.validators import ge, gt

from jackfield.abc.operator import OperatorContext, Use
from jackfield.abc.reward import RewardContext
from jackfield.errors import ConfigError, JackfieldError, OperatorError, WorkerLost
from jackfield.sdk import option
from jackfield_reward_requests import RequestFailed, Service, find, read_json, secret_headers, shown_url

_ANSWER_BYTES = 4 * 2**20
_CHARACTERS_PER_TOKEN = 4  #: for an address that does not say how many tokens it has used
_LONGEST_WAIT = 30.0  #: seconds between two attempts
_TOLERATED = ("2xx", 404, 405, 501)  #: statuses of an address without a list of models
_OWN = {"model", "messages", "stream", "n", "seed", "temperature", "max_tokens", "max_new_tokens"}
_FINAL = {"reward.secret", "reward.context", "rollout.request"}  #: codes of what another attempt does not mend


@attrs.frozen(kw_only=True)
class AskingConfig:
    """Settings of the model that is asked."""

    model: str = option("policy", "name of the model at `url`; without url, of a model of the run: `policy` is its own")
    url: str | None = option(
        None, "address of an OpenAI-compatible API, such as https://host/v1; null: a model of the run"
    )
    api_key_env: str | None = option(None, "environment variable with the key of the API; null: it needs none")
    headers: Mapping[str, str] = option(
        factory=dict, help="further headers; ${NAME} in a value is an environment variable", validator=secret_headers
    )
    sampling: Mapping[str, Any] = option(factory=dict, help="further parameters of requests, such as top_p")
    concurrency: int = option(16, "answers that are asked for at a time", ge(1))
    request_seconds: float = option(120.0, "longest time of one answer", gt(0.0))
    retries: int = option(
        3, "further attempts after a failure that may pass: no connection, 429, 5xx, a late answer", ge(0)
    )
    input_price: float = option(0.0, "price of a million tokens that are read, for the counter `cost`", ge(0.0))
    output_price: float = option(0.0, "price of a million tokens that are generated", ge(0.0))
    check: bool = option(True, "ask the API for its models at the start, to detect a wrong address or key")
    start_seconds: float = option(30.0, "longest time of that", gt(0.0))

    def __attrs_post_init__(self) -> None:
        if not self.model:
            raise _refused("model", "there is no model", "name it: `policy` is the model of the run")
        if reserved := sorted(_OWN & self.sampling.keys()):
            raise _refused("sampling", f"sampling has {', '.join(reserved)}", "use the setting of its own, or none")
        if self.url is None:
            for name in ("api_key_env", "headers", "input_price", "output_price"):
                if getattr(self, name):
                    raise _refused(name, f"{name} has no effect without url", "give the url of the model's API")
        elif not self.url.startswith(("http://", "https://")):
            raise _refused("url", f"{self.url!r} is not an address", "give one such as https://host/v1")


def _refused(where: str, message: str, fix: str) -> ConfigError:
    return ConfigError(message, where=where, fix=fix)


@attrs.frozen(kw_only=True)
class Answer:
    """An answer of a model."""

    text: str
    read: int  #: tokens of the prompt; 0 if only the sum is known
    generated: int  #: tokens of the answer, or of both


@attrs.define(eq=False)
class Model:
    """The model of some settings. It counts ``tokens`` and ``cost`` in the context."""

    _config: AskingConfig
    _context: OperatorContext
    _service: Service | None = attrs.field(default=None, init=False)
    _turns: asyncio.Semaphore = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        config, self._turns = self._config, asyncio.Semaphore(self._config.concurrency)
        if config.url is not None:
            key = {"Authorization": f"Bearer ${{{config.api_key_env}}}"} if config.api_key_env else {}
            context = RewardContext(clock=self._context.clock, http=self._context.http)
            url, headers = f"{self._base}/chat/completions", {**config.headers, **key}
            self._service = Service(context=context, url=url, headers=headers, limit=_ANSWER_BYTES)

    @property
    def _base(self) -> str:
        return (self._config.url or "").rstrip("/").removesuffix("/chat/completions")

    @property
    def name(self) -> str:
        """The model's name, and its address if it has one."""
        return self._config.model if self._service is None else f"{self._config.model} at {shown_url(self._base)}"

    @property
    def uses(self) -> tuple[Use, ...]:
        """Return what an operator that asks this model has to declare as ``Operator.uses``."""
        return ("policy",) if self._service is None and self._config.model == "policy" else ()

    async def start(self) -> None:
        """Read the secrets, and ask the API for its models."""
        if self._service is not None:
            self._service.start()
            if self._config.check:
                await self._service.wait_until_up(f"{self._base}/models", self._config.start_seconds, _TOLERATED)

    async def close(self) -> None:
        """Close the connections."""
        if self._service is not None:
            await self._service.close()

    def turn(self) -> asyncio.Semaphore:
        """Return what is to be held while an answer is asked for."""
        return self._turns

    def seed(self, *about: object) -> int:
        """Return a seed of 31 bits, of the context's and of what is asked."""
        return xxhash.xxh3_64_intdigest(repr((self._context.seed, *about)).encode(errors="backslashreplace")) >> 33

    async def ask(
        self, messages: Sequence[Mapping[str, Any]], *, temperature: float, max_tokens: int, seed: int
    ) -> Answer:
        """Return an answer; the last failure is raised if no attempt succeeds."""
        for attempt in range(self._config.retries + 1):
            try:
                answer = await self._once(messages, temperature, max_tokens, seed)
            except JackfieldError as error:
                if attempt == self._config.retries or _is_final(error):
                    raise
                told = error.retry_after if isinstance(error, RequestFailed) else None
                wait = 2.0**attempt if told is None else told
            else:
                return answer
            await self._context.clock.sleep(min(wait, _LONGEST_WAIT))
        raise AssertionError("the last attempt returns or raises")

    async def _once(
        self, messages: Sequence[Mapping[str, Any]], temperature: float, max_tokens: int, seed: int
    ) -> Answer:
        config, sampling = self._config, {"temperature": temperature, "seed": seed, **self._config.sampling}
        if self._service is None:
            generating = self._context.generate(config.model, messages, max_new_tokens=max_tokens, **sampling)
            who = f"an answer of the model {config.model}"
            generated = await self._context.clock.wait_for(generating, config.request_seconds, who)
            return self._counted(Answer(text=generated.text, read=0, generated=generated.tokens))
        body = {"model": config.model, "messages": list(messages), "max_tokens": max_tokens, **sampling}
        got = await self._service.ask("POST", body, seconds=config.request_seconds)
        return self._read(got.text, messages)

    def _read(self, text: str, messages: Sequence[Mapping[str, Any]]) -> Answer:
        """Read a chat completion."""
        completion = read_json(text, self.name)
        try:
            choice = find(completion, "choices.0")
            content = find(choice, "message.content")
        except LookupError as error:
            raise self._unusable("a chat completion", f"{error.args[0]}: {text[:300]}") from None
        told = content if isinstance(content, str) else ""
        usage = completion.get("usage")
        read, generated = (_count(usage, name) for name in ("prompt_tokens", "completion_tokens"))
        if read is None:
            read = sum(len(str(message.get("content", ""))) for message in messages) // _CHARACTERS_PER_TOKEN
        if generated is None:
            generated = len(told) // _CHARACTERS_PER_TOKEN
        answer = self._counted(Answer(text=told, read=read, generated=generated))
        if not told.strip():
            raise self._unusable("a text", f"finish_reason {choice.get('finish_reason')}")
        return answer

    def _counted(self, answer: Answer) -> Answer:
        self._context.count("tokens", answer.read + answer.generated)
        cost = answer.read * self._config.input_price + answer.generated * self._config.output_price
        if cost:
            self._context.count("cost", cost / 1e6)
        return answer

    def _unusable(self, expected: str, found: str) -> OperatorError:
        fix = "raise max_tokens" if found == "finish_reason length" else None
        what = "a model gave no usable answer"
        return OperatorError(what, code="operator.answer", where=self.name, expected=expected, found=found, fix=fix)


def _is_final(error: JackfieldError) -> bool:
    if isinstance(error, RequestFailed):
        return error.is_final
    return error.code in _FINAL or isinstance(error, ConfigError | WorkerLost)


def _count(usage: Any, name: str) -> int | None:
    value = usage.get(name) if isinstance(usage, Mapping) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
