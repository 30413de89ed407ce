"""Evaluation: the same agents and rewards on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.transfer_queue import DeleteRequest
from jackfield.cluster.device import DeviceLease
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError, RewardError, WorkerLost
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.runtime.agent_worker import RolloutJob, ends_the_run
from jackfield.runtime.reward_worker import Scored
from jackfield.runtime.samples import evaluation_seed, metric_tags, said, said_metrics
from jackfield.runtime.workers import is_lost, resubmitted, suppress_lost
from jackfield.trainer.role import Role

EVAL = "eval"  #: the partition whose samples live as long as an evaluation; the queue's controller does not know them


@attrs.frozen
class _Outcome:
    """How a held-out task went."""

    task: Task
    scored: Scored
    tags: Mapping[str, Any] | None = None  #: of its sample; None: there is none


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and tells the hooks the mean score."""

    role: Role
    tasks: Sequence[Task] = ()  #: without any, nothing is evaluated
    placement: DeviceLease

    def is_due(self, steps_done: int) -> bool:
        """Return whether the weights of ``steps_done`` steps are evaluated: at weight syncs, and at both ends."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return bool(self.tasks) and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> dict[str, float]:
        """Evaluate the weights ``version`` that the replicas serve now.

        Returns:
            ``score``: the mean over all tasks whose score is known; ``failed``: the fraction without one;
            ``response_tokens``: mean length.

        Raises:
            RewardError: ``reward.too-many-failures`` when no task has a score.
            JackfieldError: what would fail every other run, too (``ends_the_run``).
        """
        async with self.role.measure("evaluate", "trainer", version), self.placement.hold("rollout"):
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
        tags = [outcome.tags for outcome in outcomes if outcome.tags is not None]
        metrics = {
            "score": sum(scores) / len(scores),
            "failed": 1.0 - len(scores) / len(outcomes),
            "response_tokens": sum(each["response_tokens"] for each in tags) / len(outcomes),
            "tasks": float(len(outcomes)),
            **said_metrics(tags),
        }
        shown = outcomes[: self.role.config.observe.samples_per_evaluation]
        samples = tuple([await self._record(outcome) for outcome in shown])
        stored = tuple(outcome.scored.key for outcome in outcomes if outcome.tags is not None)
        await self.role.workers.backend.delete(DeleteRequest(partition=EVAL, keys=stored))
        hooks = self.role.hooks
        hooks.samples_recorded(event=SamplesRecorded(step=version, partition=EVAL, samples=samples))
        hooks.evaluation_ended(event=EvaluationEnded(step=version, metrics=metrics))
        return metrics

    async def _run(self, task: Task, version: int) -> _Outcome:
        """Run a task; an error that says nothing of other tasks is its outcome."""
        key, config = f"{EVAL}/{version}/{task.id}", self.role.config
        sampling, seconds = attrs.asdict(config.evaluation.sampling, recurse=False), config.deadlines.rollout
        sampling["seed"] = evaluation_seed(config.seed_of(config.evaluation.sampling), version, task.id)
        job = RolloutJob(id=key, partition=EVAL, group=key, task=task, sampling=sampling, seconds=seconds, last=True)
        try:
            return await resubmitted(lambda: self._attempt(job), f"sample {key}/0")
        except WorkerLost as error:
            return _failed(job, error)

    async def _attempt(self, job: RolloutJob) -> _Outcome:
        workers, clock, key = self.role.workers, self.role.clock, f"{job.id}/0"
        assert workers.rewards is not None
        agent, rewards, who = workers.agents.of(job.id), workers.rewards.of(job.id), f"held-out task {job.task.id}"
        try:
            report = await clock.wait_for(agent.run(job), 1.1 * job.seconds + 10, f"the agent worker of {who}")
            if not report.keys:
                return _failed(job, "the agent loop returned no sequence")
        except JackfieldError as error:
            if isinstance(error, WorkerLost) or is_lost(error) or ends_the_run(error):
                raise
            return _failed(job, error)
        longest = 2 * self.role.score_seconds * len(self.tasks)  # one after the other
        (scored,) = await clock.wait_for(rewards.score(EVAL, [key]), longest, f"the reward worker of {who}")
        await rewards.forget([key])
        return _Outcome(job.task, scored, {**report.tags[0], **metric_tags("reward", scored.metrics)})

    async def _record(self, outcome: _Outcome) -> SampleRecord:
        """Make a row of the table, empty where there is no sample."""
        key, error, agents = outcome.scored.key, outcome.scored.error, self.role.workers.agents
        record = SampleRecord(key=key, prompt="", response="", reward=None, response_ids=(), response_mask=())
        if outcome.tags is not None:
            with suppress_lost():
                (record,) = await resubmitted(
                    lambda: agents.of(key).records(EVAL, [key], [{}], with_reward=False),
                    f"the table's line of sample {key}",
                )
        tags: dict[str, Any] = {"task": outcome.task.id, "ground_truth": outcome.task.ground_truth}
        tags |= said(outcome.tags or {}) | ({} if error is None else {"error": error})
        return attrs.evolve(record, key=f"{EVAL}/{outcome.task.id}", reward=outcome.scored.score, tags=tags)


def _failed(job: RolloutJob, error: object) -> _Outcome:
    return _Outcome(job.task, Scored(key=f"{job.id}/0", score=None, error=str(error)))
