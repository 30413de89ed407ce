"""The HTTP client of reward agents, over aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any

import attrs
import msgspec

from jackfield.abc.reward import HttpAnswer
from jackfield.errors import RewardError


@attrs.define(eq=False)
class AiohttpClient:
    """An :class:`~jackfield.abc.reward.HttpClient` that opens its session at the first request."""

    _session: Any = attrs.field(default=None, init=False)

    async def request(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        limit: int = 16 * 2**20,
    ) -> HttpAnswer:
        """Send a request; redirections are not followed, so that a key reaches the named host alone."""
        import aiohttp  # it takes a third of a second, and not every run asks anything

        if self._session is None or self._session.closed:  # deadlines are the callers', connections the limits'
            connector = _connector()(limit=0, ttl_dns_cache=60)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        data, sent = None, dict(headers or {})
        if body is not None:
            data, sent["Content-Type"] = msgspec.json.encode(body), "application/json"
        try:
            async with self._session.request(method, url, data=data, headers=sent, allow_redirects=False) as answer:
                read = bytearray()
                async for part in answer.content.iter_any():
                    read += part
                    if len(read) > limit:
                        raise _failed(url, f"an answer of more than {limit} bytes")
                seconds, text = _seconds(answer.headers.get("Retry-After", "")), read.decode(errors="replace")
                return HttpAnswer(status=answer.status, text=text, retry_after=seconds)
        except (aiohttp.ClientError, aiohttp.InvalidURL, OSError) as error:
            raise _failed(url, f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close all connections. A later request opens others."""
        if self._session is not None:
            await self._session.close()


@cache
def _connector() -> Any:
    """Return the class of a pool without connections on which something came after an answer.

    aiohttp would take it for the answer of the next request: a service that answers twice would shift all scores.
    """
    import aiohttp

    class Connector(aiohttp.TCPConnector):
        async def _get(self, key: Any, traces: Any) -> Any:
            idle = self._conns.get(key, ())
            while idle and idle[0][0].should_close:
                idle.popleft()[0].close()
            return await super()._get(key, traces)

    return Connector


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a header Retry-After, which is a number or a date."""
    if retry_after.replace(".", "", 1).isdecimal():
        return float(retry_after)
    try:
        return max(0.0, (parsedate_to_datetime(retry_after) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):  # no date, or one without a time zone
        return None


def _failed(url: str, found: str) -> RewardError:
    where = url.partition("?")[0].rpartition("@")[2]  # a URL may have a password or a key
    return RewardError("an HTTP request has no answer", code="reward.http", where=where, found=found)
