"""What operators on tasks may ask: the model with which a run begins, other models, its reward, and HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import attrs
import xxhash

from jackfield.abc.operator import Operator, OperatorContext, Use
from jackfield.abc.reward import GeneratedText, RewardAgent, RewardContext
from jackfield.clock import Clock
from jackfield.cluster.pool import ReplicaPool
from jackfield.compose.agents import Models
from jackfield.compose.libraries import with_model_folders
from jackfield.compose.resolve import load_tokenizer
from jackfield.compose.rewards import http_client, make_reward, run_id, scorer
from jackfield.compose.workers import WorkerFactory
from jackfield.config import RunConfig
from jackfield.data.formats import TaskFormat
from jackfield.errors import OperatorError, RewardError
from jackfield.plugins.registry import Registry
from jackfield.routing import Router

T = TypeVar("T")


@attrs.define(eq=False, kw_only=True)
class Services:
    """Starts what operators ask for when the first one asks, and ends it with the pipeline.

    It belongs to one event loop.
    """

    config: RunConfig
    registry: Registry
    clock: Clock
    form: TaskFormat  #: of the records of tasks
    http: Any = attrs.field(factory=http_client, init=False)
    _stack: AsyncExitStack = attrs.field(factory=AsyncExitStack, init=False)
    _started: dict[str, asyncio.Task[Any]] = attrs.field(factory=dict, init=False)

    def identity(self, uses: Sequence[Use]) -> dict[str, Any]:
        """Return what results depend on, by what an operator uses: the policy's files, and the reward."""
        known: dict[str, Callable[[], Any]] = {"policy": self._policy, "reward": self._reward}
        return {name: known[name]() for name in uses}

    def _policy(self) -> str:
        folder = Path(with_model_folders(self.config).model.path)
        files = sorted(path for path in folder.glob("*") if path.is_file())
        told = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
        return xxhash.xxh3_128_hexdigest(repr((self.config.rollout, told)).encode())

    def _reward(self) -> list[Any]:
        name, settings = self.config.reward.name, self.config.reward.settings
        made: RewardAgent = self.registry.load("reward", name).build(
            settings, RewardContext(clock=self.clock), "reward"
        )
        return [name, dict(settings), made.version]

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Answer a conversation with the model with which the run begins, or one of the section ``models``."""
        ask = await self._once("policy" if model == "policy" else "models", partial(self._models, model == "policy"))
        answer: GeneratedText = await ask(model, messages, **sampling)
        return answer

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        """Score a response to the task of a record by the run's reward."""
        task = self.form.task(dict(values), "row", "tasks")
        told = {"data_source": task.data_source, "ground_truth": task.ground_truth, "messages": task.messages}
        score = await self._once("reward", self._scorer)
        found: float = await score({**values, **told, "prompt": _last_text(task.messages)}, response)
        return found

    async def _once(self, name: str, start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Return what is started once, for all that ask."""
        if name not in self._started:
            self._started[name] = asyncio.ensure_future(start())
        found: T = await asyncio.shield(self._started[name])
        return found

    async def _models(self, serves: bool) -> Models:
        config = with_model_folders(self.config)
        tokenizer = load_tokenizer(config)
        factory = WorkerFactory(config=config, registry=self.registry, clock=self.clock)
        factory.router = Router(self.clock, partial(tokenizer.decode, skip_special_tokens=False))
        if serves:
            pool = ReplicaPool(factory, config, self.clock)
            self._stack.push_async_callback(factory.end, 0)
            self._stack.push_async_callback(pool.close)
            await self.clock.wait_for(pool.start(1), config.deadlines.start, "the replica that operators ask")
        models = Models(config, self.registry, self.clock, factory.router, tokenizer, "pipeline", RewardError)
        self._stack.push_async_callback(models.close)
        return models

    async def _scorer(self) -> Any:
        config = self.config
        context = RewardContext(clock=self.clock, seed=config.seed, run=run_id(config), generate=self.generate)
        reward = make_reward(self.registry, config.reward.name, config.reward.settings, config.reward_service, context)
        self._stack.push_async_callback(reward.close)
        who = f"the reward {config.reward.name}, which operators ask,"
        await self.clock.wait_for(reward.start(), config.deadlines.start, who)
        return scorer(reward, config.deadlines.reward)

    async def close(self) -> None:
        """End what was started."""
        for starting in self._started.values():
            starting.cancel()
        await asyncio.gather(*self._started.values(), return_exceptions=True)
        await self._stack.aclose()
        if self.http is not None:
            await self.http.close()


@attrs.define(eq=False)
class Gate:
    """Gives an operator what it may ask, and refuses what it does not name in ``Operator.uses``.

    A stage that is there is used again while what an operator uses is the same.
    """

    name: str
    services: Services
    operator: Operator | None = None  #: set once it is made

    def given(self, context: OperatorContext) -> OperatorContext:
        """Return a context with the services."""
        shared: Any = {} if self.services.http is None else {"http": self.services.http}
        return attrs.evolve(context, generate=self.generate, score=self.score, **shared)

    async def generate(self, model: str, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> GeneratedText:
        """Ask a model."""
        if model == "policy":
            self.check("policy")
        return await self.services.generate(model, messages, **sampling)

    async def score(self, values: Mapping[str, Any], response: str) -> float:
        """Ask the reward."""
        self.check("reward")
        return await self.services.score(values, response)

    def check(self, use: Use) -> None:
        """Refuse what the operator does not say that it uses."""
        uses = () if self.operator is None else self.operator.uses
        if use not in uses:
            details: Any = {"where": self.name, "expected": f"{use} in Operator.uses", "found": uses}
            raise OperatorError(f"an operator asks the {use}, and does not say so", code="operator.contract", **details)


def _last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    content = messages[-1].get("content") if messages else ""
    return content if isinstance(content, str) else str(content)
