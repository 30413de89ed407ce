"""Asks one judge for a verdict: an OpenAI-compatible API, or a model that the run serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.reward import RewardContext, ScoreRequest
from jackfield.errors import JackfieldError, RewardError
from jackfield_reward_judge.parsing import Judgement, parse
from jackfield_reward_judge.rubrics import Rubric
from jackfield_reward_judge.settings import JudgeConfig, JudgeRewardConfig
from jackfield_reward_requests import Service, find, idempotency, read_json, shown_url

_CHARACTERS_PER_TOKEN = 4  #: for an API that does not say how many tokens it has used
_ANSWER_BYTES = 4 * 2**20
_TOLERATED = ("2xx", 404, 405, 501)  #: statuses of an API without a list of models


class NoText(RewardError, code="reward.output"):
    """A judge answered without a text, which has its cost."""

    tokens: int = 0


@attrs.frozen(kw_only=True)
class Verdict:
    """What a judge has answered, or why there is no judgement, and what it has cost."""

    messages: Sequence[Mapping[str, str]] = ()
    judgement: Judgement | None = None
    error: JackfieldError | None = None
    raw: str | None = None  #: the last answer as it came
    tokens: int = 0
    seconds: float = 0.0
    repaired: bool = False  #: whether it was asked twice


@attrs.define(eq=False)
class Judge:
    """One judge with its rubric."""

    name: str
    rubric: Rubric
    _judge: JudgeConfig
    _config: JudgeRewardConfig
    _context: RewardContext
    _service: Service | None = attrs.field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if self._judge.url is None:
            return
        key = {"Authorization": f"Bearer ${{{self._judge.api_key_env}}}"} if self._judge.api_key_env else {}
        self._service = Service(
            context=self._context,
            url=self._base + "/chat/completions",
            headers={**(self._judge.headers or {}), **key},
            retryable=self._config.retryable,
            limit=_ANSWER_BYTES,
        )

    @property
    def _base(self) -> str:
        return (self._judge.url or "").rstrip("/").removesuffix("/chat/completions")

    @property
    def where(self) -> str:
        """The judge and its address, for errors."""
        return self.name if self._service is None else f"{self.name} at {shown_url(self._service.url)}"

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

    async def verdict(self, request: ScoreRequest, key: str, pair: tuple[str, str] | None = None) -> Verdict:
        """Ask for a judgement of a response, or of a pair; a failure is in the verdict."""
        try:
            messages = self.rubric.messages(request, pair)
        except RewardError as error:
            return Verdict(error=error)
        verdict, reason = await self._once(messages, request, key)
        if reason is None or not self._config.repair:
            return attrs.evolve(verdict, messages=messages)
        again = self.rubric.repair(messages, verdict.raw or "", reason)
        second, _ = await self._once(again, request, f"{key}/repair")
        tokens, seconds = verdict.tokens + second.tokens, verdict.seconds + second.seconds
        raw = second.raw if second.raw is not None else verdict.raw
        return attrs.evolve(second, messages=messages, raw=raw, tokens=tokens, seconds=seconds, repaired=True)

    async def _once(
        self, messages: Sequence[Mapping[str, str]], request: ScoreRequest, key: str
    ) -> tuple[Verdict, str | None]:
        """Ask once; return the verdict and, if the answer could not be read, what is wrong with it."""
        clock, text, tokens, seconds = self._context.clock, None, 0, 0.0
        try:
            async with self._context.turn() as used:
                began = clock.time()
                try:
                    text, tokens, is_cut = await self._answer(messages, request, key)
                except NoText as error:
                    tokens = error.tokens
                    raise
                finally:
                    seconds = clock.time() - began
                    used(tokens)
            judgement = parse(text, self.rubric.form, self.where, is_cut)
        except JackfieldError as error:
            reason = error.message if text is not None and error.code == "reward.output" else None
            return Verdict(error=error, raw=self._redacted(text), tokens=tokens, seconds=seconds), reason
        judgement = attrs.evolve(judgement, explanation=self._redacted(judgement.explanation))
        return Verdict(judgement=judgement, raw=self._redacted(text), tokens=tokens, seconds=seconds), None

    async def _answer(
        self, messages: Sequence[Mapping[str, str]], request: ScoreRequest, key: str
    ) -> tuple[str, int, bool]:
        """Return an answer's text, the tokens that it has cost, and whether it ended at the limit of tokens."""
        model, sampling = str(self._judge.model), dict(self._judge.sampling or {})
        seconds = min(self._config.request_seconds or request.deadline_seconds, request.deadline_seconds)
        if self._service is None:
            generating = self._context.generate(model, messages, **sampling)
            answer = await self._context.clock.wait_for(generating, seconds, f"an answer of the judge {self.name}")
            return answer.text, answer.tokens, False
        body: dict[str, Any] = {"model": model, "messages": messages, **sampling}
        if self._judge.structured:
            schema = {"name": "verdict", "strict": True, "schema": self.rubric.form.schema}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        headers = {"Idempotency-Key": idempotency(key, self._context.run, body)}
        got = await self._service.ask("POST", body, seconds=seconds, headers=headers)
        return self._read(got.text, messages)

    def _read(self, text: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, int, bool]:
        """Read a chat completion."""
        completion = read_json(text, self.where)
        try:
            choice = find(completion, "choices.0")
            content = find(choice, "message.content")
        except LookupError as error:
            found = f"{error.args[0]}: {text[:300]}"
            raise self._unusable("a judge's API gave no chat completion", found) from None
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
        if not isinstance(content, str) or not content.strip():
            refusal = choice["message"].get("refusal")
            ended = f"finish_reason {choice.get('finish_reason')}"
            missing = self._unusable(
                "a judge gave no answer", f"the refusal {str(refusal)[:300]!r}" if refusal else ended
            )
            missing.tokens = _tokens(completion, messages, "")
            raise missing
        return content, _tokens(completion, messages, content), choice.get("finish_reason") == "length"

    def _unusable(self, message: str, found: str) -> NoText:
        fix = "raise max_tokens in `sampling`" if found == "finish_reason length" else None
        expected = "a chat completion with a text"
        return NoText(message, where=self.where, expected=expected, found=found, fix=fix)

    def _redacted(self, text: str | None) -> str | None:
        return text if text is None or self._service is None else self._service.redacted(text)


def _tokens(completion: Mapping[str, Any], messages: Sequence[Mapping[str, str]], content: str) -> int:
    """Return how many tokens an API says that it has used, or an estimate."""
    usage = completion.get("usage")
    usage = usage if isinstance(usage, Mapping) else {}
    used = usage.get("total_tokens")
    if isinstance(used, int) and not isinstance(used, bool) and used >= 0:
        return used
    return (sum(len(message["content"]) for message in messages) + len(content)) // _CHARACTERS_PER_TOKEN
