"""A reward by a reward model, as a plugin."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import attrs

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.errors import DeadlineExceeded, RewardError
from jackfield_reward_model.settings import Config

if TYPE_CHECKING:
    from jackfield_reward_model.model import RewardModel


@attrs.frozen(eq=False)
class _Waiting:
    """A conversation that waits for its batch."""

    tokens: list[int]
    score: asyncio.Future[tuple[float, float]]  #: and the seconds of its share of the batch


class ModelReward(RewardAgent):
    """A reward that is the output of a model with a scalar head for the whole conversation.

    Conversations that wait at the same time are batched. The model and its tokenizer run
    in threads of their own.
    """

    def __init__(self, config: Config, context: RewardContext) -> None:
        super().__init__(config, context)
        self._model: RewardModel | None = None
        #: for the model and for its tokenizer, so that one works while the other does
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None
        self._batching: asyncio.Task[None] | None = None
        self._waiting: list[_Waiting] = []
        self._news, self._is_full = asyncio.Event(), asyncio.Event()

    @property
    def version(self) -> str | None:
        """Return a digest of the model's files; None before the start."""
        return None if self._model is None else self._model.version

    async def start(self) -> None:
        """Load the model; ``reward.model`` if it has no scalar head, no chat template or no token for padding."""
        if self._threads is None:
            first, second = (ThreadPoolExecutor(1, thread_name_prefix=f"reward-{each}") for each in ("model", "tokens"))
            self._threads = first, second
        if self._model is None:
            self._model = await self._in_thread(0, _load, self.config)
        if self._batching is None:
            self._batching = asyncio.create_task(self._batches(), name="batches of the reward model")

    async def close(self) -> None:
        """End the thread, after the batch that it works on."""
        if self._batching is not None:
            self._batching.cancel()
            await asyncio.gather(self._batching, return_exceptions=True)
        for thread in self._threads or ():
            await asyncio.to_thread(thread.shutdown, cancel_futures=True)
        for waiting in self._waiting:
            waiting.score.cancel()
        self._waiting = []
        self._model = self._threads = self._batching = None

    async def compute_score(self, request: ScoreRequest) -> ScoreResult:
        """Score one conversation."""
        if self._batching is None:
            await self.start()
        assert self._model is not None
        try:
            tokens, is_cut = await self._in_thread(1, self._model.encode, self._conversation(request))
        except RewardError as error:
            return ScoreResult(status="failed", error=str(error), is_final=True)
        if self._batching is None:  # it was closed meanwhile
            return ScoreResult(status="failed", error="the reward model was closed")
        waiting = _Waiting(tokens, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._news.set()
        if not self._is_full.is_set() and self._fitting() < len(self._waiting):
            self._is_full.set()
        score, seconds = await waiting.score
        metrics = {"truncated": float(is_cut), "tokens": float(len(tokens))}
        if not math.isfinite(score):
            return ScoreResult(status="failed", error=f"the reward model's output is {score}", metrics=metrics)
        return ScoreResult(score=score, metrics=metrics, tokens=len(tokens), seconds=seconds)

    def _conversation(self, request: ScoreRequest) -> list[Mapping[str, Any]]:
        text = request.solution_str if self.config.response == "whole" else request.model_text
        prompt: list[Mapping[str, Any]] = list(request.messages)
        if not prompt and request.prompt_str:
            prompt = [{"role": "user", "content": request.prompt_str}]
        return [*prompt, {"role": "assistant", "content": text}]

    async def _in_thread(self, number: int, function: Any, *arguments: Any) -> Any:
        assert self._threads is not None
        return await asyncio.get_running_loop().run_in_executor(self._threads[number], function, *arguments)

    def _fitting(self) -> int:
        """Return how many of the conversations that wait fit into a batch, with padding; at least one."""
        longest = 0
        for count, each in enumerate(self._waiting):
            longest = max(longest, len(each.tokens))
            if count and longest * (count + 1) > self.config.batch_tokens:
                return count
        return len(self._waiting)

    async def _batches(self) -> None:
        """Score what waits, batch after batch, until it is cancelled."""
        config: Config = self.config
        while True:
            await self._news.wait()
            self._is_full.clear()
            if config.batch_seconds and self._fitting() == len(self._waiting):
                await self._until_full(config.batch_seconds)
            batch = self._next_batch()
            if not self._waiting:
                self._news.clear()
            if batch:
                await self._score(batch)

    async def _until_full(self, seconds: float) -> None:
        with contextlib.suppress(DeadlineExceeded):
            await self.context.clock.wait_for(self._is_full.wait(), seconds, "further conversations of a batch")

    def _next_batch(self) -> list[_Waiting]:
        """Take the conversations of the next batch, in the order of their arrival; the cancelled ones are dropped."""
        self._waiting = [each for each in self._waiting if not each.score.done()]
        count = self._fitting()
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch

    async def _score(self, batch: list[_Waiting]) -> None:
        assert self._model is not None
        began = self.context.clock.time()
        try:
            scores = await self._in_thread(0, self._model.score, [each.tokens for each in batch])
        except asyncio.CancelledError:  # at the end
            for each in batch:
                each.score.cancel()
            raise
        except Exception as error:
            if len(batch) > 1:  # one of them, or their number, is too much
                for each in batch:
                    await self._score([each])
            elif not batch[0].score.done():
                batch[0].score.set_exception(error)
            return
        seconds = (self.context.clock.time() - began) / sum(len(each.tokens) for each in batch)
        for each, score in zip(batch, scores, strict=True):
            if not each.score.done():
                each.score.set_result((score, seconds * len(each.tokens)))


def _load(config: Config) -> RewardModel:
    from jackfield_reward_model.model import RewardModel  # here, because settings are read without torch

    return RewardModel(config)
