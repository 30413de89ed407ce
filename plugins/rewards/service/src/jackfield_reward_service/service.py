"""The reward agent ``service``, a client of the rewards that ``jackfield rewards serve`` shares among runs."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs
from attrs.validators import gt

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, JackfieldError, RewardError, RpcError
from jackfield.sdk import option
from jackfield.sdk.rpc import Address, Connection, Contract, Process, connect, is_loopback, stub
from jackfield.sdk.rpc.connection import MSGPACK
from jackfield.sdk.rpc.wire import LIMIT

T = TypeVar("T")

_SCORING = Contract(RewardAgent, ["compute_score", "finish_group", "score_group"])
_HOST_PORT = re.compile(r"(?P<host>\[[^]]+\]|[^/\[\]:]+):(?P<port>\d{1,5})")
_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  #: seconds between attempts to connect, at first and at most
_START_SECONDS = 30.0  #: at most, for the first connection
_LOSSES = 10  #: connections to one process that a call may lose
_MARGIN = 1 << 16  #: bytes of a message beside the content
_BEAT_SECONDS = 30.0  #: silence of a service by HOST:PORT after which the connection is given up


class Described:
    """What a service says of a reward that it serves."""

    async def describe(self) -> dict[str, Any]:
        """Return ``compares``, ``finishes`` and ``version``, and numbers for people."""
        raise NotImplementedError


_DESCRIBED = Contract(Described, ["describe"])


@attrs.frozen(kw_only=True)
class ServiceConfig:
    """Settings that name a service and a reward of it."""

    address: str = option(help="address.json in the folder of the service; HOST:PORT for one on this machine.")
    served: str = option(help="Name of the reward in the service's file.")
    token_env: str | None = option(None, "Environment variable with the service's token; only for HOST:PORT.")
    run: str | None = option(None, "Name of this run at the service, which shares turns among runs; null: the run's.")
    reconnect_seconds: float = option(600.0, "Longest time without the service before scores fail.", gt(0.0))
    wait_seconds: float = option(86400.0, "Longest time for one score, with all waiting at the service.", gt(0.0))

    def __attrs_post_init__(self) -> None:
        direct = _HOST_PORT.fullmatch(self.address)
        details: dict[str, Any] = {"where": "reward.token_env", "found": self.token_env}
        if direct is None and self.token_env is not None:
            raise ConfigError("token_env has no effect: the file has a secret", expected="null", **details)
        if direct is not None and self.token_env is None:
            fix = "export the service's token, and name the variable; or give the path of address.json"
            raise ConfigError("a service by HOST:PORT needs its token", expected="a variable", fix=fix, **details)
        if direct is not None and not is_loopback(direct["host"].strip("[]")):
            fix = "give the path of the service's address.json, on a file system that both machines have"
            details = {"where": "reward.address", "expected": "a loopback address", "found": self.address, "fix": fix}
            raise ConfigError("HOST:PORT is for this machine, as the connection is not encrypted", **details)


class ServiceReward(RewardAgent):
    """A reward of another process.

    A lost connection is opened again, and unanswered requests are sent again. They have the same key, by which the
    service knows scores that it has paid for. After ``reconnect_seconds`` without a service calls raise
    ``reward.unavailable``.
    """

    config: ServiceConfig

    def __init__(self, config: ServiceConfig, context: RewardContext) -> None:
        super().__init__(config, context)
        self._described: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[Connection] | None = None
        self._random = random.Random(f"{context.seed} {os.getpid()}")  # clients of one service do not move in step

    @property
    def compares(self) -> bool:
        """Return whether the served reward compares groups; known after :meth:`start`."""
        return bool(self._described.get("compares"))

    @property
    def version(self) -> str | None:
        """The version of the served reward; known after :meth:`start`."""
        version: str | None = self._described.get("version")
        return version

    @property
    def keeps_deadlines(self) -> bool:
        """The service counts execution only."""
        return True

    async def start(self) -> None:
        """Connect, and ask what the reward does.

        It raises ``reward.unavailable`` if there is no service, and ``reward.not-served`` if it has no such reward.
        """
        await self._connected(min(self.config.reconnect_seconds, _START_SECONDS))

    async def close(self) -> None:
        """Close the connection."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
            self._connecting = None
        if self._connection is not None:
            await self._connection.close()
            self._connection = None
            for _ in range(3):  # the task that watches the connection ends in these turns of the event loop
                await asyncio.sleep(0)

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Have the service score one sample."""
        return await self._call(lambda served: served.compute_score(request), [request])

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Have the service score one group."""
        return await self._call(lambda served: served.score_group(requests), requests)

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Have the service adjust the scores of a group, if the served reward does."""
        if not self._described.get("finishes"):
            return scores
        return await self._call(lambda served: served.finish_group(requests, scores), [*requests, *scores])

    async def _call(self, call: Callable[[RewardAgent], Awaitable[T]], content: Sequence[Any]) -> T:
        """Call the served reward, over as many connections as it takes; refuse content that no message can carry."""
        if (size := len(MSGPACK.encode(list(content)))) > LIMIT - _MARGIN:
            what, expected = "a request is too long for the service", f"at most {LIMIT - _MARGIN} bytes"
            raise RewardError(what, code="reward.request", where=_key(content), expected=expected, found=size)
        clock, until = self.context.clock, self.context.clock.time() + self.config.wait_seconds
        lost: list[Process | None] = []
        while True:
            connection = await self._connected(self.config.reconnect_seconds)
            try:
                left = max(until - clock.time(), 0.001)
                served: Any = stub(connection, f"reward {self.config.served}", _SCORING, object, left)
                return await call(served)
            except RpcError as error:
                if error.code != "rpc.lost" or not connection.lost.done():
                    raise
                lost.append(connection.process)
                if lost.count(connection.process) >= _LOSSES:
                    what, fix = f"the service has lost {_LOSSES} connections", "look at the log of the service"
                    details: Any = {"where": self.config.address, "found": error.found, "fix": fix}
                    raise RewardError(what, code="reward.unavailable", **details) from error

    async def _connected(self, seconds: float) -> Connection:
        """Return a connection; open one if there is none, once for all that wait."""
        if self._connection is not None and not self._connection.lost.done():
            return self._connection
        if self._connecting is None or self._connecting.done():
            self._connecting = asyncio.ensure_future(self._connect(seconds))
            self._connecting.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._connection = await asyncio.shield(self._connecting)
        return self._connection

    async def _connect(self, seconds: float) -> Connection:
        clock, pause = self.context.clock, _PAUSE
        until = clock.time() + seconds
        while True:
            try:
                connection = await self._open()
                about = stub(connection, f"about {self.config.served}", _DESCRIBED, Described, _BEAT_SECONDS)
                self._described = await about.describe()  # one that has started again may have other code
                return connection
            except JackfieldError as error:
                if error.code not in ("rpc.lost", "rpc.address", "deadline"):
                    raise
                if clock.time() + pause > until:
                    details: Any = {"where": self.config.address, "expected": "`jackfield rewards serve` at work there"}
                    fix = "start the service again, or correct reward.address"
                    what, found = f"no reward service answered for {seconds:g} s", f"{error.message}: {error.found}"
                    raise RewardError(what, code="reward.unavailable", found=found, fix=fix, **details) from error
            await clock.sleep(pause * self._random.uniform(0.5, 1.0))
            pause = min(2.0 * pause, _LONGEST_PAUSE)

    async def _open(self) -> Connection:
        """Connect once; refuse a service that does not have the reward."""
        config, served = self.config, self.config.served
        contracts = {f"reward {served}": _SCORING, f"about {served}": _DESCRIBED}
        name = config.run or self.context.run or f"process {os.getpid()}"
        try:
            return await connect(self._address(), name, self.context.clock, contracts, kills=False)
        except RpcError as error:
            found = error.found if isinstance(error.found, dict) else {}
            if error.code != "rpc.version" or found.get(f"reward {served}") is not None:
                raise
            details: Any = {"where": config.address, "expected": "a name under rewards in the file of the service"}
            what, fix = f"the service has no reward {served!r}", "correct reward.served, or the service's file"
            raise RewardError(what, code="reward.not-served", found=served, fix=fix, **details) from error

    def _address(self) -> Address:
        """Return the address. A file is read at each attempt: a service that has started again writes another one."""
        direct = _HOST_PORT.fullmatch(self.config.address)
        if direct is None:
            return Address.read(Path(self.config.address).expanduser())
        token = self.context.secret(str(self.config.token_env))
        host, port = direct["host"].strip("[]"), int(direct["port"])
        secret, here = token_secret(token), Process.of(os.getpid())
        return Address(host=host, port=port, secret=secret, heartbeat_seconds=_BEAT_SECONDS, process=here)


def _key(content: Sequence[Any]) -> str:
    return next((each.idempotency_key for each in content if isinstance(each, ScoreRequest)), "")


def token_secret(token: str) -> str:
    """Return the secret that both ends of a connection prove to know."""
    return hashlib.sha256(f"jackfield rewards {token}".encode()).hexdigest()
