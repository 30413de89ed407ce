"""The port on which rewards arrive over HTTP: ``POST /rewards`` and ``GET /pending``, with a token."""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
from aiohttp import web

from jackfield.errors import ConfigError, JackfieldError, RewardError
from jackfield_reward_service.store import Reward, Store

_BODY_BYTES = 16 * 2**20
_STATUS = {"reward.unknown-sample": 404, "reward.conflict": 409, "reward.pushed": 400, "reward.token": 401}
_LIMIT = 1000  #: samples of an answer, if the request does not say how many
_HTTP = {404: "there is nothing at this path", 405: "there is no such method", 413: "the request is too long"}


@attrs.define(eq=False)
class Endpoint:
    """A web server for one store. Each request needs the header ``Authorization: Bearer TOKEN``."""

    _store: Store
    _token: str
    _added: Callable[[], None]  #: called when rewards were added
    _runner: web.AppRunner | None = attrs.field(default=None, init=False)

    async def start(self, host: str, port: int) -> str:
        """Listen, and return the URL; ``config.invalid-value`` if the address cannot be used."""
        app = web.Application(client_max_size=_BODY_BYTES, middlewares=[self._guard])
        app.add_routes([web.post("/rewards", self._rewards), web.get("/pending", self._pending)])
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port).start()
        except OSError as error:
            await self.close()
            details: Any = {"where": "reward.port", "found": error, "fix": "choose another port, or 0"}
            raise ConfigError("rewards cannot arrive over HTTP", **details) from error
        bound = self._runner.addresses[0][1]
        return f"http://[{host}]:{bound}" if ":" in host else f"http://{host}:{bound}"

    async def close(self) -> None:
        """Stop to listen."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[..., Awaitable[web.StreamResponse]]) -> Any:
        """Check the token, and turn errors into JSON."""
        given = request.headers.get("Authorization", "")
        try:
            if not hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode()):
                expected = "Authorization: Bearer TOKEN, with the token of the reward"
                raise RewardError("the request has no valid token", code="reward.token", expected=expected)
            return await handler(request)
        except JackfieldError as error:
            status = _STATUS.get(error.code, 500)
            headers = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            return web.json_response({"error": error.as_dict()}, status=status, headers=headers)
        except web.HTTPException as error:
            fields = RewardError(_HTTP.get(error.status, error.reason), code="reward.pushed").as_dict()
            return web.json_response({"error": fields}, status=error.status)

    async def _rewards(self, request: web.Request) -> web.Response:
        try:
            body = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            expected = "JSON: a reward, or a list of rewards"
            raise RewardError(
                "the request is not JSON", code="reward.pushed", expected=expected, found=error
            ) from error
        rewards = [
            Reward.of(each, f"reward {number}")
            for number, each in enumerate(body if isinstance(body, list) else [body])
        ]
        pushed = self._store.add(rewards)
        self._added()
        return web.json_response(attrs.asdict(pushed))

    async def _pending(self, request: web.Request) -> web.Response:
        text = request.query.get("limit", str(_LIMIT))
        if not text.isdecimal() or len(text) > 9:
            raise RewardError("the limit is no number", code="reward.pushed", where="limit", found=text)
        return web.json_response({"pending": [attrs.asdict(each) for each in self._store.pending(int(text))]})
