"""The HTTP client of reward agents, over aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import attrs
import msgspec

from jackfield.abc.reward import HttpAnswer
from jackfield.errors import PluginError, RewardError


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
        aiohttp = _aiohttp()
        if self._session is None or self._session.closed:  # deadlines are the callers', connections the limits'
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
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
                after = answer.headers.get("Retry-After", "")
                seconds = float(after) if after.replace(".", "", 1).isdecimal() else None
                return HttpAnswer(status=answer.status, text=read.decode(errors="replace"), retry_after=seconds)
        except (aiohttp.ClientError, aiohttp.InvalidURL, OSError) as error:
            raise _failed(url, f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Close all connections. A later request opens others."""
        if self._session is not None:
            await self._session.close()


def _aiohttp() -> Any:
    try:
        return import_module("aiohttp")
    except ImportError as error:
        fix = "pip install aiohttp"
        raise PluginError("the HTTP client of rewards needs aiohttp", where="aiohttp", found=error, fix=fix) from error


def _failed(url: str, found: str) -> RewardError:
    where = url.partition("?")[0].rpartition("@")[2]  # a URL may have a password or a key
    return RewardError("an HTTP request has no answer", code="reward.http", where=where, found=found)
