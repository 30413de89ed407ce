"""A service behind HTTP that a reward asks: secrets, deadlines, and what its failures mean."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Collection, Mapping
from typing import Any
from urllib.parse import quote

import attrs
import msgspec

from jackfield.abc.reward import HttpAnswer, HttpClient, RewardContext, ScoreResult
from jackfield.errors import ConfigError, DeadlineExceeded, JackfieldError, RewardError
from jackfield_reward_requests.client import AiohttpClient
from jackfield_reward_requests.templates import described

_SECRET = re.compile(r"\$\{([A-Za-z_]\w*)\}")
_KEY_HEADERS = frozenset({"api-key", "authorization", "cookie", "proxy-authorization", "x-api-key"})
_ABSENT = type(RewardContext().http)  #: stands for the client that a context does not have
_SHOWN = 300  #: characters of an answer in an error
_POLL_SECONDS = 1.0  #: between two questions whether a service is up

#: Statuses of a service that is busy or broken for a while.
RETRYABLE: tuple[int | str, ...] = (408, 429, "5xx")
SUCCESS: tuple[int | str, ...] = ("2xx",)


class RequestFailed(RewardError, code="reward.http"):
    """A service gave no usable answer; the attributes go to the ``ScoreResult``."""

    retry_after: float | None = None
    is_final: bool = False
    status: int | None = None


def secret_headers(_: Any, attribute: attrs.Attribute[Any], headers: Mapping[str, str]) -> None:
    """Validate a setting of headers: a key is the name of an environment variable, ``${NAME}``."""
    for name, value in headers.items():
        if name.lower() in _KEY_HEADERS and not _SECRET.search(value):
            raise ConfigError(
                f"the header {name} has a secret in a configuration file",
                where=f"{attribute.name}.{name}",
                expected="the name of an environment variable, such as ${API_KEY}",
                found="a text without one",
                fix="export the secret where the reward runs, and name the variable",
            )


def statuses(_: Any, attribute: attrs.Attribute[Any], value: Collection[int | str]) -> None:
    """Validate a setting of HTTP statuses: numbers, or classes such as ``5xx``."""
    for each in value:
        if not re.fullmatch(r"[1-5](\d\d|xx)", str(each)):
            raise ValueError(f"{each!r} is not an HTTP status such as 429, or a class of them such as 5xx")


@attrs.define(eq=False, kw_only=True)
class Service:
    """A service at one address. It uses the context's client, or one of its own if the context has none.

    ``headers`` may name environment variables, ``${NAME}``, which :meth:`start` reads.
    """

    context: RewardContext = attrs.field(repr=False)
    url: str = attrs.field(repr=False)  #: it may have a password
    headers: Mapping[str, str] = attrs.field(factory=dict)
    success: Collection[int | str] = SUCCESS
    retryable: Collection[int | str] = RETRYABLE
    limit: int = 16 * 2**20  #: bytes of the longest answer
    _own: AiohttpClient | None = attrs.field(default=None, init=False)
    _sent: dict[str, str] | None = attrs.field(default=None, init=False, repr=False)
    _secrets: list[str] = attrs.field(factory=list, init=False, repr=False)

    def start(self) -> None:
        """Read the secrets; ``reward.secret`` if one is missing or cannot be a header."""
        if self._sent is None:
            sent = {name: _SECRET.sub(self._secret, value) for name, value in self.headers.items()}
            self._sent = sent

    async def close(self) -> None:
        """Close connections of its own."""
        if self._own is not None:
            await self._own.close()

    async def ask(
        self,
        method: str,
        body: Any,
        *,
        seconds: float,
        headers: Mapping[str, str] | None = None,
        url: str | None = None,
    ) -> HttpAnswer:
        """Send a request and return an answer of a successful status, without the secrets.

        Anything else raises ``RequestFailed``, and ``DeadlineExceeded`` after ``seconds``.
        """
        self.start()
        url = url or self.url
        sent = {**(self._sent or {}), **(headers or {})}
        request = self._client.request(method, url, body=body, headers=sent, limit=self.limit)
        answer = await self.context.clock.wait_for(request, seconds, f"an answer of {shown_url(url)}")
        answer = attrs.evolve(answer, text=self.redacted(answer.text))
        if not _among(answer.status, self.success):
            raise self._refusal(answer, url)
        return answer

    async def wait_until_up(self, url: str, seconds: float, tolerated: Collection[int | str] = ()) -> None:
        """Ask ``url`` until it answers with success, for at most ``seconds``; else raise the last failure."""
        clock = self.context.clock
        ends = clock.time() + seconds
        while True:
            try:
                await self.ask("GET", None, url=url, seconds=max(ends - clock.time(), 0.001))
                return
            except RequestFailed as error:
                if error.status is not None and _among(error.status, tolerated):
                    return
                if error.is_final or clock.time() + _POLL_SECONDS >= ends:
                    raise
            except RewardError:  # no connection yet
                if clock.time() + _POLL_SECONDS >= ends:
                    raise
            await clock.sleep(_POLL_SECONDS)

    def redacted(self, text: str) -> str:
        """Return a text without the secrets, which a service may repeat, and without halves of characters."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text.encode(errors="replace").decode()

    @property
    def _client(self) -> HttpClient:
        if not isinstance(self.context.http, _ABSENT):
            return self.context.http
        if self._own is None:
            self._own = AiohttpClient()
        return self._own

    def _secret(self, found: re.Match[str]) -> str:
        secret = self.context.secret(found[1]).strip()
        if not secret.isascii() or not secret.isprintable():
            raise RewardError(
                "a secret of the reward cannot be in an HTTP header",
                code="reward.secret",
                where=found[1],
                expected="printable characters of ASCII",
                found="others",
            )
        self._secrets.append(secret)
        return secret

    def _refusal(self, answer: HttpAnswer, url: str) -> RequestFailed:
        fix = None
        if answer.status in (401, 403):
            fix = "check the key of the service"
        elif answer.status // 100 == 3:
            fix = "redirections are not followed, so that a key reaches the named host alone: set the new address"
        refusal = RequestFailed(
            f"a service answered with the status {answer.status}",
            where=shown_url(url),
            expected=", ".join(map(str, self.success)),
            found=_cut(answer.text) or "no text",
            fix=fix,
        )
        refusal.status, refusal.retry_after = answer.status, answer.retry_after
        refusal.is_final = not _among(answer.status, self.retryable)
        return refusal


def failed(error: JackfieldError, tokens: int = 0, seconds: float = 0.0, raw: str | None = None) -> ScoreResult:
    """Return the result of a score that has ended with an error."""
    is_final = error.is_final if isinstance(error, RequestFailed) else error.code == "reward.template"
    return ScoreResult(
        status="timeout" if isinstance(error, DeadlineExceeded) else "failed",
        error=str(error),
        is_final=is_final,
        is_unavailable=error.code == "reward.http" and not is_final,
        retry_after=error.retry_after if isinstance(error, RequestFailed) else None,
        tokens=tokens,
        seconds=seconds,
        raw=raw,
    )


def read_json(text: str, where: str) -> Any:
    """Return a JSON answer; ``reward.output`` if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RewardError(
            "an answer of a service is not JSON",
            code="reward.output",
            where=where,
            expected="JSON",
            found=f"{_cut(text)!r}: {error}"[: _SHOWN + 200],
        ) from None


def finite(value: Any, what: str, where: str) -> float:
    """Return a number, or a truth value as 0 or 1; ``reward.output`` for anything else, NaN and infinity."""
    if isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value)
    raise RewardError(
        f"{what} is not a finite number",
        code="reward.output",
        where=where,
        expected="a finite number",
        found=described(value),
    )


def idempotency(key: str, *content: Any) -> str:
    """Return a key as an HTTP header can have it.

    A digest of ``content`` follows. Keys of samples are the same in all runs, and a run that resumes may have another
    response under the same key: without the digest a service that knows keys would answer for another text.
    """
    text = quote(key, safe="".join(map(chr, range(33, 127))))
    return f"{text}@{hashlib.sha256(msgspec.json.encode(content)).hexdigest()[:16]}" if content else text


def shown_url(url: str) -> str:
    """Return a URL without its user, password and query."""
    return url.partition("?")[0].rpartition("@")[2]


def _among(status: int, accepted: Collection[int | str]) -> bool:
    return status in accepted or str(status) in accepted or f"{status // 100}xx" in accepted


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text)} characters)"
