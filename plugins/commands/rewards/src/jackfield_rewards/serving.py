"""The service behind ``jackfield rewards serve``."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.compose.rewards import make_reward
from jackfield.compose.run import folder_lock
from jackfield.errors import ConfigError
from jackfield.files import replace_file
from jackfield.plugins import discover
from jackfield.runtime.reward_service import RewardService
from jackfield.sdk.rpc import Contract, Server, Service, caller
from jackfield_rewards.remembered import Remembered, id_of
from jackfield_rewards.settings import ServeConfig
from jackfield_rewards.turns import FairTurns

ADDRESS_FILE = "address.json"
_SCORING = Contract(RewardAgent, ["compute_score", "finish_group", "score_group"])
Results = list[ScoreResult]


@attrs.define(eq=False)
class _Work:
    """A call of the reward, for which one or several requests wait."""

    task: asyncio.Task[Results]
    waiters: int = 0


@attrs.define(eq=False)
class Front:
    """What runs call in the place of a reward: in turns, and each score once."""

    name: str
    service: RewardService
    clock: Clock
    turns: FairTurns
    remembered: Remembered
    orphan_seconds: float
    settings: str = ""  #: of the reward, as a text
    scored: int = attrs.field(default=0, init=False)
    again: int = attrs.field(default=0, init=False)  #: scores that were asked for again
    _work: dict[bytes, _Work] = attrs.field(factory=dict, init=False)

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one sample."""

        async def score(number: int) -> Results:
            return [await self.service.compute_score(attrs.evolve(request, priority=number))]

        return (await self._once([request], score))[0]

    async def score_group(self, requests: Sequence[ScoreRequest]) -> Sequence[ScoreResult]:
        """Score one group."""

        async def score(number: int) -> Results:
            return list(await self.service.score_group([attrs.evolve(each, priority=number) for each in requests]))

        return await self._once(requests, score)

    async def finish_group(
        self, requests: Sequence[ScoreRequest], scores: Sequence[ScoreResult]
    ) -> Sequence[ScoreResult]:
        """Adjust the scores of a group."""
        return await self.service.finish_group(requests, scores)

    async def describe(self) -> dict[str, Any]:
        """Return what clients need to know, and numbers for people."""
        kind = type(self.service.agent)
        own = (kind.finish_group, kind.post_process_scores) != (
            RewardAgent.finish_group,
            RewardAgent.post_process_scores,
        )
        return {
            "compares": self.service.compares,
            "finishes": own,
            "version": self.service.version,
            "scored": self.scored,
            "again": self.again,
            "in_progress": self.turns.in_progress,
            "waiting": self.turns.waiting,
            "counts": {name: round(number, 3) for name, number in sorted(self.service.limits.counts.items())},
        }

    async def _once(self, requests: Sequence[ScoreRequest], score: Callable[[int], Awaitable[Results]]) -> Results:
        """Return known results, or wait for the call that scores these requests, which may be under way."""
        connection = caller()
        key = id_of([self.name, self.settings, self.service.version], connection.name, requests)
        if (known := self.remembered.get(key)) is not None:
            self.again += 1
            return known
        if (work := self._work.get(key)) is None:
            task = asyncio.ensure_future(self._score(connection.name, key, requests, score))
            task.add_done_callback(lambda done: done.cancelled() or done.exception())  # the caller may be gone
            task.add_done_callback(lambda _: self._work.pop(key, None))
            work = self._work[key] = _Work(task)
        else:
            self.again += 1
        work.waiters += 1
        try:
            return await asyncio.shield(work.task)
        finally:
            work.waiters -= 1
            if not work.waiters and not work.task.done():
                await self._leave(work, lost=connection.lost.done())

    async def _leave(self, work: _Work, *, lost: bool) -> None:
        """End work without a waiter; after a lost connection, only if no one asks for it again for some time."""
        if lost and self.orphan_seconds:
            end = lambda: work.waiters or work.task.cancel()  # noqa: E731
            asyncio.get_running_loop().call_later(self.orphan_seconds, end)
        else:
            work.task.cancel()
            await asyncio.wait([work.task])

    async def _score(
        self, run: str, key: bytes, requests: Sequence[ScoreRequest], score: Callable[[int], Awaitable[Results]]
    ) -> Results:
        async with self.turns.turn(run, requests[0].priority if requests else 0) as number:
            results = await score(number)
        self.scored += len(results)
        if all(each.status == "ok" for each in results):
            self.remembered.put(key, results)
        return results

    async def close(self) -> None:
        """End the calls under way, and the reward."""
        tasks = [work.task for work in self._work.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.service.close()


@attrs.define(eq=False)
class Overview:
    """What the service does, for people."""

    fronts: Sequence[Front]
    server: Server

    async def overview(self) -> list[dict[str, Any]]:
        """Return a row for each reward."""
        clients = sorted(connection.name for connection in self.server.clients.values() if connection is not caller())
        return [{"name": each.name, **await each.describe(), "clients": clients} for each in self.fronts]


@asynccontextmanager
async def serving(config: ServeConfig, clock: Clock | None = None) -> AsyncIterator[tuple[Server, Path]]:
    """Serve rewards; yield the server and the file with its address.

    Raise ``run.folder-in-use`` if the folder's rewards are served already, ``rpc.address`` if the address is in use,
    and what a reward raises that cannot start.
    """
    clock, registry, folder = clock or Clock(), discover(), Path(config.folder)
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        stack.enter_context(folder_lock(folder))
        secret, file = token_secret(_token(config, folder)), folder / ADDRESS_FILE
        remembered = Remembered(folder / "remembered.sqlite", config.remember_seconds)
        stack.callback(remembered.close)
        services, fronts = dict[str, Service](), list[Front]()
        for name, each in config.rewards.items():
            context = RewardContext(
                clock=clock, seed=config.seed, logs=str(folder / "logs" / name), run=f"served {name}"
            )
            service = make_reward(registry, each.reward.name, each.reward.settings, each.reward_service, context)
            most = 2 * service.limits.most if service.limits.most else config.in_flight
            settings = json.dumps([each.reward.name, dict(each.reward.settings)], sort_keys=True, default=str)
            front = Front(name, service, clock, FairTurns(most), remembered, config.orphan_seconds, settings)
            stack.push_async_callback(front.close)
            fronts.append(front)
            await clock.wait_for(service.start(), config.start_seconds, f"the reward {name} to start")
            services[f"reward {name}"] = Service(target=front, contract=_SCORING)
            services[f"about {name}"] = Service(target=front, contract=Contract(Front, ["describe"]))
        server = Server("the reward service", services, clock, config.heartbeat_seconds, watches=False)
        services["service"] = Service(target=Overview(fronts, server), contract=Contract(Overview))
        stack.push_async_callback(server.close)
        server.address = attrs.evolve(await server.listen(config.host, config.port), secret=secret)
        server.address.write(file)
        stack.callback(file.unlink, missing_ok=True)
        yield server, file


def _token(config: ServeConfig, folder: Path) -> str:
    """Return the token, which stays the same over restarts."""
    if config.token_env is not None:
        if token := os.environ.get(config.token_env):
            return token
        fix = f"export {config.token_env}=…, or leave token_env out"
        raise ConfigError("the service has no token", where="token_env", found=f"no {config.token_env}", fix=fix)
    file = folder / "token"
    if not file.is_file():
        replace_file(file, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
    return file.read_text(encoding="utf-8").strip()


def token_secret(token: str) -> str:
    """Return the secret that both ends of a connection prove to know; the client computes the same."""
    return hashlib.sha256(f"jackfield rewards {token}".encode()).hexdigest()
