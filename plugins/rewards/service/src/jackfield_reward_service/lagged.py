"""The reward agent ``lagged``, whose rewards arrive later, from outside."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import Any

import attrs
from attrs.validators import ge, gt, le

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import ConfigError, DeadlineExceeded
from jackfield.sdk import option, replace_file
from jackfield_reward_service.store import Pending, Reward, Store, key_of

_FOLDER = "lagged"  #: in the cache folder


@attrs.frozen(kw_only=True)
class LaggedConfig:
    """Settings that say where rewards arrive, and for how long a sample waits."""

    folder: str | None = option(None, "Folder of the samples that wait and of their rewards; null: one in the cache.")
    wait_seconds: float = option(7 * 86400.0, "Longest time that a sample waits, over restarts of the run.", gt(0.0))
    poll_seconds: float = option(1.0, "Time between looks for rewards from other processes.", gt(0.0))
    port: int | None = option(None, "Port to take rewards over HTTP; 0: a free one; null: no HTTP.", [ge(0), le(65535)])
    host: str = option("127.0.0.1", "Address of the port.")
    token_env: str | None = option(None, "Environment variable with the token of the port; null: FOLDER/token.")

    def __attrs_post_init__(self) -> None:
        for name, is_set in (("token_env", self.token_env is not None), ("host", self.host != "127.0.0.1")):
            if is_set and self.port is None:
                details: Any = {
                    "where": f"reward.{name}",
                    "expected": "a port",
                    "fix": "set reward.port, or leave it out",
                }
                raise ConfigError(f"{name} has no effect without a port", found=getattr(self, name), **details)


class LaggedReward(RewardAgent):
    """A reward that someone pushes: with the command, from Python, or over HTTP.

    A sample is registered in a file and waits. After a restart it waits again, and finds a reward that was pushed in
    the meantime. Its key for pushing has a digest of its text.
    """

    config: LaggedConfig

    def __init__(self, config: LaggedConfig, context: RewardContext) -> None:
        super().__init__(config, context)
        self._store: Store | None = None
        self._waiting: dict[str, set[asyncio.Future[Reward]]] = {}
        self._are_waiting = asyncio.Event()
        self._looking: asyncio.Task[None] | None = None
        self._endpoint: Any = None
        self._commits = False  #: whether a commit is about to happen

    @property
    def keeps_deadlines(self) -> bool:
        """Samples wait for ``wait_seconds``."""
        return True

    async def start(self) -> None:
        """Open the file, and the port if there is one; raise ``reward.store``, or ``config.invalid-value``."""
        if self._store is not None:
            return
        folder = self._folder()
        store = Store(folder)
        store.open(create=True)
        self._store = store
        self._looking = asyncio.ensure_future(self._look(store))
        if self.config.port is not None:
            from jackfield_reward_service.web import Endpoint

            self._endpoint = Endpoint(store, self._token(folder), lambda: self._deliver(store))
            url = await self._endpoint.start(self.config.host, self.config.port)
            replace_file(folder / "url", f"{url}\n", mode=0o600)

    async def close(self) -> None:
        """Close the port and the file."""
        if self._endpoint is not None:
            await self._endpoint.close()
            self._endpoint = None
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
            self._looking = None
        if self._store is not None:
            self._store.close()
            self._store = None

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Register a sample and wait for its reward."""
        store, key = self._store, key_of(request.idempotency_key, request.prompt_str, request.solution_str)
        assert store is not None, "the agent has been started"
        now = time.time()
        sample = Pending(
            key=key,
            sample=request.idempotency_key,
            since=now,
            run=self.context.run,
            data_source=request.data_source,
            prompt=request.prompt_str,
            response=request.solution_str,
            ground_truth=request.ground_truth,
        )
        left = store.register(sample) + self.config.wait_seconds - now
        self._commit_soon(store)
        reward = store.reward(key)
        if reward is None and left > 0.0:
            reward = await self._arrival(key, left)
        if reward is None:
            store.give_up(key)
            text = f"no reward came for {key} in {self.config.wait_seconds:g} s (reward.wait_seconds)"
            return ScoreResult(status="timeout", error=text, is_final=True)
        return ScoreResult(score=reward.score, explanation=reward.explanation, dimensions=reward.dimensions)

    def _commit_soon(self, store: Store) -> None:
        """Commit, once, what all tasks of this turn of the event loop have registered."""

        def commit() -> None:
            self._commits = False
            store.commit()

        if not self._commits:
            self._commits = True
            asyncio.get_running_loop().call_soon(commit)

    async def _arrival(self, key: str, seconds: float) -> Reward | None:
        """Wait for a reward; return None if it does not arrive in time."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        self._are_waiting.set()
        try:
            return await self.context.clock.wait_for(future, seconds, f"the reward of {key}")
        except DeadlineExceeded:
            return None
        finally:
            self._waiting[key].discard(future)
            if not self._waiting[key]:
                del self._waiting[key]
            if not self._waiting:
                self._are_waiting.clear()

    async def _look(self, store: Store) -> None:
        """Look for rewards from other processes, while any sample waits; one look is for all of them."""
        while True:
            await self._are_waiting.wait()
            if store.has_changed():
                self._deliver(store)
            await self.context.clock.sleep(self.config.poll_seconds)

    def _deliver(self, store: Store) -> None:
        for reward in store.news():
            for future in self._waiting.get(reward.key, ()):
                if not future.done():
                    future.set_result(reward)

    def _folder(self) -> Path:
        if self.config.folder is not None:
            return Path(self.config.folder).expanduser()
        if self.context.cache is None:
            fix = "set reward.folder to a folder that stays"
            raise ConfigError("there is no folder for rewards that arrive later", where="reward.folder", fix=fix)
        return self.context.cache / _FOLDER

    def _token(self, folder: Path) -> str:
        """Return the token of the port; without a variable it is made once and kept in a file of this user alone."""
        if self.config.token_env is not None:
            return self.context.secret(self.config.token_env)
        file = folder / "token"
        if not file.is_file():
            replace_file(file, f"{secrets.token_urlsafe(32)}\n", mode=0o600)
        return file.read_text(encoding="utf-8").strip()
