"""The reward ``http``: a score is the answer of a service."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import DeadlineExceeded, RewardError
from jackfield_reward_http.settings import HttpRewardConfig
from jackfield_reward_requests import (
    Service,
    failed,
    field_of,
    fill,
    fill_text,
    find,
    finite,
    idempotency,
    read_json,
    shown_url,
)
from jackfield_reward_requests.templates import described

_RAW_CHARACTERS = 64 * 1024  #: of an answer that is kept


class HttpReward(RewardAgent):
    """A reward that asks a service for the score of each sample, or of a whole group at once.

    A status that is not a success, an answer that breaks off and one without a finite score are ``failed``, never a
    score. A retry has the same idempotency key.
    """

    def __init__(self, config: HttpRewardConfig, context: RewardContext) -> None:
        super().__init__(config, context)
        accepted: dict[str, Any] = {"success": config.success, "retryable": config.retryable}
        self._service = Service(
            context=context, url=config.url, headers=config.headers, limit=config.answer_bytes, **accepted
        )
        self._where = shown_url(config.url)

    @property
    def compares(self) -> bool:
        """Return whether one request is for a whole group."""
        return self.config.group is not None

    @property
    def version(self) -> str | None:
        """The version of the service that the settings give."""
        version: str | None = self.config.version
        return version

    async def start(self) -> None:
        """Read the secrets, and wait until the address ``health`` answers."""
        self._service.start()
        if self.config.health is not None:
            await self._service.wait_until_up(self.config.health, self.config.start_seconds)

    async def close(self) -> None:
        """Close the connections."""
        await self._service.close()

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Ask for the score of one sample."""
        if self.compares:
            return (await self.score_group([request]))[0]
        began = self.context.clock.time()
        try:
            text = await self._ask(self._body(request), request, request.idempotency_key)
        except (RewardError, DeadlineExceeded) as error:
            return failed(error, seconds=self.context.clock.time() - began)
        return self._result(text, None, self.context.clock.time() - began)

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Ask for the scores of one group, with a single request if the setting ``group`` is given."""
        group = self.config.group
        if group is None or not requests:
            return await super().score_group(requests)
        began = self.context.clock.time()
        keys = "\n".join(request.idempotency_key for request in requests)
        try:
            bodies = [self._body(request) for request in requests]
            body = fill(group.body, lambda name: bodies if name == "samples" else field_of(requests[0], name))
            text = await self._ask(body, requests[0], hashlib.sha256(keys.encode()).hexdigest())
            answers = self._answers(text, len(requests))
        except (RewardError, DeadlineExceeded) as error:
            return [failed(error, seconds=(self.context.clock.time() - began) / len(requests)) for _ in requests]
        share = (self.context.clock.time() - began) / len(requests)
        return [self._result(None, answer, share) for answer in answers]

    def _body(self, request: ScoreRequest) -> Any:
        return fill(self.config.body, lambda name: field_of(request, name))

    async def _ask(self, body: Any, request: ScoreRequest, key: str) -> str:
        config: HttpRewardConfig = self.config
        url, read = config.url, lambda name: field_of(request, name)
        if config.query:
            values = {name: fill_text(value, read) for name, value in config.query.items()}
            url += ("&" if "?" in url else "?") + urlencode(values)
        sent = None if config.method == "GET" else body
        headers = {}
        if config.idempotency_header is not None and key:
            headers[config.idempotency_header] = idempotency(key, self.context.run, url, sent)
        seconds = request.deadline_seconds
        return (await self._service.ask(config.method, sent, seconds=seconds, headers=headers, url=url)).text

    def _answers(self, text: str, count: int) -> list[Any]:
        """Return the answers for the samples of a group."""
        path = self.config.group.answers
        found = self._find(read_json(text, self._where), path, "the list of answers")
        if isinstance(found, list) and len(found) == count:
            return found
        raise RewardError(
            "a service did not answer for each sample of a group",
            code="reward.output",
            where=f"{path or 'the answer'} of {self._where}",
            expected=f"a list of {count}",
            found=described(found),
        )

    def _result(self, text: str | None, answer: Any, seconds: float) -> ScoreResult:
        """Return the result that is in an answer, which is ``text`` if it has not been parsed yet."""
        paths = self.config.answer
        try:
            answer = answer if text is None else read_json(text, self._where)
            self._refuse_error(answer)
            score = self._number(answer, paths.score, "the score")
            dimensions = {name: self._number(answer, path, name) for name, path in paths.dimensions.items()}
            tokens = 0 if paths.tokens is None else int(self._number(answer, paths.tokens, "the number of tokens"))
            explanation = None if paths.explanation is None else self._text(answer, paths.explanation, "explanation")
            raw = self._text(answer, paths.raw or "", "raw answer") if text is None or paths.raw else text
        except RewardError as error:
            return failed(error, seconds=seconds, raw=None if text is None else self._kept(text))
        return ScoreResult(
            score=score,
            dimensions=dimensions,
            explanation=None if explanation is None else self._service.redacted(explanation),
            raw=None if raw is None else self._kept(raw),
            tokens=tokens,
            seconds=seconds,
        )

    def _refuse_error(self, answer: Any) -> None:
        """Raise the error that an answer has in the place of a score."""
        path = self.config.answer.error
        if path is None:
            return
        try:
            found = find(answer, path)
        except LookupError:
            return
        if found is None or found is False or found == "":
            return
        text = fill_text("{error}", lambda _: found)
        where = f"{path} of {self._where}"
        raise RewardError("a service gave no score", where=where, expected="a score", found=text[:1000])

    def _number(self, answer: Any, path: str, what: str) -> float:
        return finite(self._find(answer, path, what), what, f"{path or 'the answer'} of {self._where}")

    def _text(self, answer: Any, path: str, what: str) -> str | None:
        found = self._find(answer, path, f"the {what}")
        return None if found is None else fill_text("{text}", lambda _: found)

    def _find(self, answer: Any, path: str, what: str) -> Any:
        try:
            return find(answer, path)
        except LookupError as error:
            raise RewardError(
                f"an answer of a service has not {what}",
                code="reward.output",
                where=f"{path} of {self._where}",
                expected=path,
                found=str(error.args[0]),
                fix="set the path of the reward's settings under `answer` to where the service puts it",
            ) from None

    def _kept(self, raw: str) -> str:
        return self._service.redacted(raw)[:_RAW_CHARACTERS]
