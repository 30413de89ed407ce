"""The connection: reconnection, deadlines, and the requirements of a server."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    NoPermissionError,
    OutOfMemoryError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError
from jackfield_transport_redis.config import Config

T = TypeVar("T")

_REFUSALS = (AuthenticationError, AuthorizationError, NoPermissionError)  # the first two are connection errors, too
_FIRST_PAUSE, _LAST_PAUSE = 0.05, 1.0
_OLDEST = (6, 2)  #: has COPY
_STRICTER = {"always": ("always",), "everysec": ("everysec", "always")}


class Server:
    """A connection to a Redis server."""

    def __init__(self, config: Config) -> None:
        parts = urlsplit(config.url)
        self.label = f"{parts.scheme}://{parts.hostname or ''}{f':{parts.port}' if parts.port else ''}{parts.path}"
        self._config = config
        self._clock = Clock()
        password = os.environ.get(config.password_variable) if parts.password is None else None
        if not (parts.password or password or _is_local(parts.hostname)):
            raise QueueError(
                "a server beyond this host has to ask for a password",
                code="queue.store",
                where=self.label,
                expected=f"a password in the environment variable {config.password_variable}, or in the URL",
                fix="set requirepass, or users, on the server",
            )
        login: Any = {} if password is None else {"password": password}
        self._client = aioredis.Redis.from_url(
            config.url,
            **login,
            socket_connect_timeout=config.seconds,
            socket_timeout=config.seconds,
            retry=Retry(NoBackoff(), 0),  # ours: it knows the deadline
            client_name="jackfield",
        )

    async def check(self) -> None:
        """Refuse (``queue.store``) a server that is too old, a replica, evicting, or not durable as required."""
        found: dict[str, Any] = await self.run(lambda client: client.info("all"), repeats=False)
        version = tuple(int(part) for part in str(found["redis_version"]).split(".")[:2])
        if version < _OLDEST:
            raise self._unfit("the server is too old", "Redis 6.2 or newer", found["redis_version"], "upgrade it")
        if found.get("role") != "master":
            raise self._unfit("the server is a replica", "role master", found.get("role"), "name its master")
        policy = found.get("maxmemory_policy")
        if found.get("maxmemory") and policy != "noeviction":
            fix = "CONFIG SET maxmemory-policy noeviction; a full server then refuses puts"
            raise self._unfit("the server evicts rows when memory is short", "noeviction", policy, fix)
        await self._check_log(found)

    async def _check_log(self, found: dict[str, Any]) -> None:
        wanted = self._config.durability
        if wanted == "none":
            return
        if not found.get("aof_enabled"):
            fix = "start it with --appendonly yes, or set durability: none"
            raise self._unfit("the server keeps no log: its rows would die with it", "appendonly yes", "no", fix)
        if found.get("aof_last_write_status") != "ok":
            fix = "look at the server's disk and log"
            raise self._unfit("the server could not write its log", "ok", found.get("aof_last_write_status"), fix)
        settings = await self.run(lambda client: client.config_get("appendfsync"))
        if settings["appendfsync"] not in _STRICTER[wanted]:
            fix = f"CONFIG SET appendfsync {wanted}, or a weaker durability"
            message = f"the server promises less than durability: {wanted}"
            raise self._unfit(message, wanted, settings["appendfsync"], fix)

    async def run(self, work: Callable[[Any], Awaitable[T]], repeats: bool = True) -> T:
        """Do ``work`` with a client; after a lost connection, repeat it until the deadline (``repeats``).

        Raises:
            QueueError: ``queue.unreachable``, ``queue.store``; ``queue.full`` if the server's memory is.
        """
        until = self._clock.time() + self._config.seconds
        pause = _FIRST_PAUSE
        while True:
            try:
                return await self._attempt(work, until - self._clock.time())
            except QueueError as error:
                if not repeats or error.code != "queue.unreachable" or self._clock.time() + pause >= until:
                    raise
            await self._clock.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)

    async def close(self) -> None:
        """End all connections."""
        await self._client.aclose()

    async def _attempt(self, work: Callable[[Any], Awaitable[T]], seconds: float) -> T:
        try:
            return await self._clock.wait_for(work(self._client), max(seconds, 0.001), f"Redis at {self.label}")
        except _REFUSALS as error:
            raise self._unfit("the server refuses the login", "user and password that it knows", error, None) from error
        except OutOfMemoryError as error:
            raise QueueError("the server's memory is full", code="queue.full", where=self.label, found=error) from error
        except (RedisConnectionError, RedisTimeoutError, DeadlineExceeded, OSError) as error:
            raise QueueError(
                "the server does not answer",
                code="queue.unreachable",
                where=self.label,
                found=" ".join(str(error).split()),
                fix="look whether it runs and the URL is right",
            ) from error
        except ResponseError as error:
            if str(error).startswith(("WRONGPASS", "NOAUTH", "NOPERM")):
                raise self._unfit("the server refuses the login", "user and password", error, None) from error
            raise self._unfit("the server refuses", None, error, None) from error
        except RedisError as error:
            raise self._unfit("the server refuses", None, error, None) from error

    def _unfit(self, message: str, expected: object, found: object, fix: str | None) -> QueueError:
        return QueueError(message, code="queue.store", where=self.label, expected=expected, found=found, fix=fix)


def _is_local(host: str | None) -> bool:
    if host is None or host == "localhost":
        return True  # a socket's path
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
