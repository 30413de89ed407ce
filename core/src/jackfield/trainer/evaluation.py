"""Evaluation: the same agents and rewards on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.transfer_queue import DeleteRequest, TransferQueueBackend
from jackfield.clock import Clock
from jackfield.cluster.device import DeviceLease
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, RewardError, WorkerLost
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.runtime.agent_worker import AgentWorker, RolloutJob, ends_the_run
from jackfield.runtime.reward_worker import RewardWorker, Scored
from jackfield.runtime.samples import evaluation_seed, metric_tags, said, said_metrics
from jackfield.runtime.workers import Workers, is_lost, resubmitted, suppress_lost
from jackfield.trainer.schedule import Schedule
from jackfield.trainer.stages import Stages

__all__ = ["Evaluator"]

EVAL = "eval"  #: the partition whose samples live as long as an evaluation; the queue's controller does not know them


@attrs.frozen
class _Outcome:
    """How a held-out task went."""

    task: Task
    scored: Scored
    tags: Mapping[str, Any] | None = None  #: of its row; None: there is none


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and tells the hooks the mean score."""

    tasks: Sequence[Task]
    schedule: Schedule
    every: int  #: evaluate every so many steps, at weight syncs, and at both ends
    agents: Workers[AgentWorker]
    rewards: Workers[RewardWorker]
    backend: TransferQueueBackend
    placement: DeviceLease
    clock: Clock
    stages: Stages
    sampling: Mapping[str, Any]
    seed: int
    rollout_seconds: float
    score_seconds: float
    recorded: int = 16  #: samples shown in the table

    def is_due(self, steps_done: int) -> bool:
        """Return whether the weights of ``steps_done`` steps are evaluated."""
        return steps_done in (0, self.schedule.steps) or self.schedule.is_due(self.every, steps_done)

    async def evaluate(self, version: int) -> dict[str, float]:
        """Evaluate the weights ``version`` that the replicas serve now.

        Returns:
            ``score``: the mean over all tasks whose score is known; ``failed``: the fraction without one;
            ``response_tokens``: mean length.

        Raises:
            RewardError: ``reward.too-many-failures`` when no task has a score.
            JackfieldError: what would fail every other run, too (``ends_the_run``).
        """
        async with self.stages.measure("evaluate", "trainer", version), self.placement.hold("rollout"):
            outcomes = await asyncio.gather(*(self._run(task, version) for task in self.tasks))
        scores = [outcome.scored.score for outcome in outcomes if outcome.scored.score is not None]
        if not scores:
            raise RewardError(
                "no task of the evaluation has a score",
                code="reward.too-many-failures",
                where=f"evaluation of weights {version}",
                expected="a score for one task at least",
                found=outcomes[0].scored.error,
                fix="correct what the first task met",
            )
        lengths = [outcome.tags["response_tokens"] for outcome in outcomes if outcome.tags is not None]
        metrics = {
            "score": sum(scores) / len(scores),
            "failed": 1.0 - len(scores) / len(outcomes),
            "response_tokens": sum(lengths) / len(outcomes),
            "tasks": float(len(outcomes)),
            **said_metrics(outcome.tags for outcome in outcomes if outcome.tags is not None),
        }
        shown = tuple([await self._record(outcome) for outcome in outcomes[: self.recorded]])
        stored = tuple(outcome.scored.key for outcome in outcomes if outcome.tags is not None)
        await self.backend.delete(DeleteRequest(partition=EVAL, keys=stored))
        hooks = self.stages.hooks
        hooks.samples_recorded(event=SamplesRecorded(step=version, partition=EVAL, samples=shown))
        hooks.evaluation_ended(event=EvaluationEnded(step=version, metrics=metrics))
        return metrics

    async def _run(self, task: Task, version: int) -> _Outcome:
        key = f"{EVAL}/{version}/{task.id}"
        sampling = {**self.sampling, "seed": evaluation_seed(self.seed, version, task.id)}
        job = RolloutJob(
            id=key, partition=EVAL, group=key, task=task, sampling=sampling, seconds=self.rollout_seconds, last=True
        )
        try:
            return await resubmitted(lambda: self._attempt(job), f"sample {key}/0")
        except WorkerLost as error:
            return _failed(job, error)

    async def _attempt(self, job: RolloutJob) -> _Outcome:
        agent, rewards, key = self.agents.of(job.id), self.rewards.of(job.id), f"{job.id}/0"
        who = f"held-out task {job.task.id}"
        try:
            report = await self.clock.wait_for(agent.run(job), 1.1 * job.seconds + 10, f"the agent worker of {who}")
            if not report.keys:
                return _failed(job, "the agent loop returned no sequence")
        except JackfieldError as error:
            if isinstance(error, WorkerLost) or is_lost(error) or ends_the_run(error):
                raise
            return _failed(job, error)
        scoring, longest = rewards.score(EVAL, [key]), 2 * self.score_seconds * len(self.tasks)  # one after the other
        (scored,) = await self.clock.wait_for(scoring, longest, f"the reward worker of {who}")
        await rewards.forget([key])
        return _Outcome(job.task, scored, {**report.tags[0], **metric_tags("reward", scored.metrics)})

    async def _record(self, outcome: _Outcome) -> SampleRecord:
        """A row of the table; empty where there is no sample."""
        key, error = outcome.scored.key, outcome.scored.error
        record = SampleRecord(key=key, prompt="", response="", reward=None, response_ids=(), response_mask=())
        if outcome.tags is not None:
            reading = lambda: self.agents.of(key).records(EVAL, [key], [{}], with_reward=False)  # noqa: E731
            with suppress_lost():
                (record,) = await resubmitted(reading, f"the table's line of sample {key}")
        tags: dict[str, Any] = {"task": outcome.task.id, "ground_truth": outcome.task.ground_truth}
        tags = {**tags, **said(outcome.tags or {})}
        tags = tags if error is None else {**tags, "error": error}
        return attrs.evolve(record, key=f"{EVAL}/{outcome.task.id}", reward=outcome.scored.score, tags=tags)


def _failed(job: RolloutJob, error: object) -> _Outcome:
    return _Outcome(job.task, Scored(key=f"{job.id}/0", score=None, error=str(error)))
