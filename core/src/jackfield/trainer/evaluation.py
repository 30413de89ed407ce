"""The evaluation of held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from jackfield.abc.reward import ScoreResult
from jackfield.abc.transfer_queue import DeleteRequest
from jackfield.errors import some
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.queue.meta import GroupKey, RolloutReport, group_of
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import metric_tags, said, said_metrics, sampling_seed
from jackfield.runtime.workers import RolloutJob
from jackfield.trainer.role import Role
from jackfield.trainer.rollouts import in_parts, run_rollouts, without_scores

EVAL = "eval"  #: the partition of an evaluation's samples; they are deleted with it, and the controller never sees them


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and reports the mean score to the hooks."""

    role: Role

    def is_due(self, steps_done: int) -> bool:
        """Return whether to evaluate, if there are tasks: at both ends of the run and at due weight syncs."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return "eval" in self.role.tasks and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> float:
        """Evaluate the weights that the replicas serve now, those of ``version``; report and return the score.

        The metrics are ``score``, the mean over the tasks that have one, ``failed``, the fraction of tasks without one,
        and ``response_tokens``, the mean length of the responses. An error that every task would have is raised; so is
        ``reward.too-many-failures`` if no task has a score.
        """
        tasks = self.role.tasks["eval"]
        async with self.role.measure("evaluate", "trainer", version), self.role.rollout_devices.hold("rollout"):
            records = await self._records(version)
        scores = [record.reward for record in records if record.reward is not None]
        if not scores:
            where, errors = f"evaluation of weights {version}", (str(record.tags["error"]) for record in records)
            raise without_scores("no task has a score", where, "a score for one task at least", errors)
        tokens = {each.key: each.tags["response_tokens"] for each in records if "response_tokens" in each.tags}
        metrics = {
            "score": sum(scores) / len(scores),
            "failed": 1.0 - len(scores) / len(records),
            "response_tokens": sum(tokens.values()) / len(records),
            "tasks": float(len(records)),
            **said_metrics([record.tags for record in records]),
        }
        shown = records[: self.role.config.observe.samples_per_evaluation]
        keys = [record.key for record in shown if record.key in tokens]
        texts = {text.key: text for text in await self.role.records(EVAL, keys, [{}] * len(keys))}
        samples = [
            attrs.evolve(texts.get(record.key, record), key=f"{EVAL}/{task.id}", reward=record.reward, tags=record.tags)
            for task, record in zip(tasks, shown, strict=False)
        ]
        await self.role.workers.backend.delete(DeleteRequest(partition=EVAL, keys=tuple(tokens)))
        hooks = self.role.hooks
        hooks.emit(SamplesRecorded(step=version, partition=EVAL, samples=tuple(samples)))
        hooks.emit(EvaluationEnded(step=version, metrics=metrics))
        return float(metrics["score"])

    async def _records(self, version: int) -> list[SampleRecord]:
        """Run and score all tasks; return their samples without texts. An error of one task only becomes a tag."""
        config, tasks = self.role.config, self.role.tasks["eval"]
        seed = partial(sampling_seed, config.seed_of(config.evaluation.sampling), "evaluation", version)
        jobs = [
            RolloutJob(
                group=GroupKey(EVAL, version, number),
                task=task,
                rollouts={0: seed(task.id)},
                sampling=attrs.asdict(config.evaluation.sampling, recurse=False),
                seconds=config.deadlines.rollout,
                evaluates=True,
            )
            for number, task in enumerate(tasks)
        ]
        reports, scoring = dict[str, RolloutReport](), list[asyncio.Task[dict[str, ScoreResult]]]()

        async def score(ended: Sequence[RolloutReport]) -> None:
            reports.update((each.group, each) for each in ended)
            scoring.append(asyncio.ensure_future(self._scores([key for each in ended for key in each.keys])))

        try:
            await run_rollouts(self.role, jobs, score)
            found = {key: result for scores in await asyncio.gather(*scoring) for key, result in scores.items()}
        finally:
            for each in scoring:
                each.cancel()
        records = []
        for job in jobs:
            report = reports[str(job.group)]
            told: dict[str, Any] = {"task": job.task.id, "ground_truth": job.task.ground_truth}
            result = ScoreResult(status="failed", error=report.error or "the agent loop returned no sequence")
            if report.keys:
                result, tags = found[report.keys[0]], report.written.tags[0]
                told |= {"response_tokens": tags["response_tokens"], **{name: tags[name] for name in said(tags)}}
                told |= metric_tags("reward", result.metrics)
            if result.error is not None:
                told["error"] = result.error
            row: Any = {"prompt": "", "response": "", "response_ids": (), "response_mask": ()}
            records.append(SampleRecord(key="".join(report.keys), reward=result.score, tags=told, **row))
        return records

    async def _scores(self, keys: Sequence[str]) -> dict[str, ScoreResult]:
        """Score samples; those of a worker that dies repeatedly have failed."""
        assert self.role.workers.rewards is not None
        shares = self.role.workers.rewards.shares(keys, lambda key: GroupKey.of(group_of(key)).index)
        found = await asyncio.gather(*(self._share(worker, mine) for worker, mine in shares))
        return {key: result for scores in found for key, result in scores.items()}

    async def _share(self, worker: RewardWorker, keys: Sequence[str]) -> dict[str, ScoreResult]:
        longest = 2 * self.role.score_seconds * len(self.role.tasks["eval"])  # if scored in turn
        wait, found = self.role.clock.wait_for, dict[str, ScoreResult]()

        async def score(keys: Sequence[str]) -> None:
            found.update(await wait(worker.score(EVAL, keys), longest, f"the reward worker of samples {some(keys)}"))

        async for lost, error in in_parts(keys, score, keys, "the scores of held-out samples"):
            found |= dict.fromkeys(lost, ScoreResult(status="failed", error=str(error)))
        return found
