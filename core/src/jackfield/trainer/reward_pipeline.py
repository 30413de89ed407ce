"""The reward pipeline: rows to scores as they come, whole groups to rewards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import ChatTokenizer
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.errors import DeadlineExceeded, QueueError, RewardError
from jackfield.queue import BatchMeta, GroupView, TransferQueue, column_from_rows, rows_of
from jackfield.trainer.samples import TRAIN
from jackfield.trainer.stages import Stages

__all__ = ["RewardPipeline", "score_sample"]

CONSUMER = "reward"
_COLUMNS = ("prompt_ids", "response_ids", "task")


@attrs.frozen
class _Lease:
    """A row's place in the batch that it was leased with."""

    batch: BatchMeta
    index: int


@attrs.define(kw_only=True, eq=False)
class RewardPipeline:
    """Leases rows the moment they are there, scores them concurrently, and writes ``reward`` for whole groups.

    A score that fails or misses its deadline fails its row by name; the group's policy then decides.
    """

    queue: TransferQueue
    agent: RewardAgent
    tokenizer: ChatTokenizer
    clock: Clock
    stages: Stages
    score_seconds: float
    idle_seconds: float  #: how long nothing may come before the wait is begun anew
    _scores: dict[str, asyncio.Future[ScoreResult]] = attrs.field(factory=dict, init=False)
    _leases: dict[str, _Lease] = attrs.field(factory=dict, init=False)
    _pruned: int = attrs.field(default=-1, init=False)  #: the last ticket at which dropped groups were forgotten

    def register(self) -> None:
        """Announce the consumer to the queue, before any row is put."""
        self.queue.register_consumer(CONSUMER, TRAIN, _COLUMNS, lease_seconds=self.score_seconds + self.idle_seconds)

    async def run(self) -> None:
        """Score until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._score_groups(tasks))
            while True:
                try:
                    batch = await self.queue.lease(CONSUMER, deadline_seconds=self.idle_seconds)
                except DeadlineExceeded:
                    continue  # nothing to score is no failure; whoever needs a reward has a deadline of its own
                await self._start_scoring(batch, tasks)

    async def _start_scoring(self, batch: BatchMeta, tasks: asyncio.TaskGroup) -> None:
        columns = await self.queue.get(batch, _COLUMNS)
        rows = zip(batch.keys, *(rows_of(columns[name]) for name in _COLUMNS), strict=True)
        for index, (key, prompt_ids, response_ids, task) in enumerate(rows):
            self._leases[key] = _Lease(batch, index)
            scoring = tasks.create_task(self._score(key, prompt_ids.tolist(), response_ids.tolist(), task))
            future = self._score_of(key)
            scoring.add_done_callback(
                lambda done, future=future: done.cancelled() or future.done() or future.set_result(done.result())  # type: ignore[misc]
            )

    def _score_of(self, key: str) -> asyncio.Future[ScoreResult]:
        if key not in self._scores:
            self._scores[key] = asyncio.get_running_loop().create_future()
        return self._scores[key]

    async def _score(
        self, key: str, prompt_ids: Sequence[int], response_ids: Sequence[int], task: Mapping[str, Any]
    ) -> ScoreResult:
        if task["reward"] is not None:
            return ScoreResult(score=float(task["reward"]))
        request = ScoreRequest(
            data_source=task["data_source"],
            solution_str=self.tokenizer.decode(response_ids),
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            prompt_str=self.tokenizer.decode(prompt_ids),
            response_ids=tuple(response_ids),
            idempotency_key=key,
            deadline_seconds=self.score_seconds,
        )
        return await score_sample(self.agent, request, self.clock)

    async def _score_groups(self, tasks: asyncio.TaskGroup) -> None:
        async for group in self.queue.settled_groups(TRAIN):
            tasks.create_task(self._finish(group))

    async def _finish(self, group: GroupView) -> None:
        ticket = group.ticket
        async with self.stages.measure("reward", "reward", ticket):
            scores = [await self._wait_for_score(key) for key in group.keys]
            scores = list(self.agent.post_process_scores(scores))
        self._forget_dropped(ticket)
        good = [(key, score) for key, score in zip(group.keys, scores, strict=True) if score.status == "ok"]
        leases = [self._leases.pop(key) for key in group.keys]
        for key in group.keys:
            del self._scores[key]
        if good:
            await self.queue.put([key for key, _ in good], {"reward": _reward_column([score for _, score in good])})
        for key, score in zip(group.keys, scores, strict=True):
            if score.status != "ok":
                self.queue.fail_rows([key], f"reward {score.status}: {score.error}")
        for batch in {id(lease.batch): lease.batch for lease in leases}.values():
            mine = [lease.index for lease in leases if lease.batch is batch]
            await self.queue.ack(batch.select(mine), step=ticket)

    async def _wait_for_score(self, key: str) -> ScoreResult:
        """A score has its own deadline from when its row was leased; a row that nobody leases is named here."""
        seconds = self.score_seconds + self.idle_seconds
        return await self.clock.wait_for(self._score_of(key), seconds, f"the reward of sample {key}")

    def _forget_dropped(self, ticket: int) -> None:
        """Once a ticket: scores of groups that were dropped, or whose ticket is done, will never be asked for."""
        if ticket <= self._pruned:
            return
        self._pruned = ticket
        for key, lease in list(self._leases.items()):
            if self._is_gone(lease.batch.group_ids[lease.index]):
                del self._leases[key]
                self._scores.pop(key, None)

    def _is_gone(self, group: str) -> bool:
        try:
            return self.queue.group(group).state == "dropped"
        except QueueError:
            return True


async def score_sample(agent: RewardAgent, request: ScoreRequest, clock: Clock) -> ScoreResult:
    """Score under the request's deadline; whatever goes wrong becomes a status, never a score."""
    try:
        result = await clock.wait_for(
            agent.compute_score(request), request.deadline_seconds, f"the reward of sample {request.idempotency_key}"
        )
    except DeadlineExceeded as error:
        return ScoreResult(status="timeout", error=str(error))
    except Exception as error:
        return ScoreResult(status="failed", error=f"{type(error).__name__}: {error}")
    finite = isinstance(result.score, int | float) and result.score - result.score == 0
    if result.status == "ok" and not finite:
        refusal = RewardError(
            "a reward agent returned no finite score",
            code="reward.output",
            where=request.idempotency_key,
            found=result.score,
        )
        return ScoreResult(status="failed", error=str(refusal))
    return result


def _reward_column(scores: Sequence[ScoreResult]) -> Any:
    """Jagged float32: one number for a row, or one for each of its response tokens."""
    import torch

    return column_from_rows(
        [torch.tensor(score.token_scores or (score.score,), dtype=torch.float32) for score in scores]
    )
