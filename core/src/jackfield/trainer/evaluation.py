"""The evaluation of held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import attrs

from jackfield.abc.reward import ScoreResult
from jackfield.abc.transfer_queue import DeleteRequest
from jackfield.algorithms.repeated import metrics_of_tasks
from jackfield.config.evaluation import SetSettings
from jackfield.errors import WeightsError, some
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.queue.meta import GroupKey, RolloutReport, group_of
from jackfield.runtime.agent_worker import RolloutJob
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import sampling_seed
from jackfield.runtime.tags import metric_tags, said, said_metrics
from jackfield.trainer.rewards import without_scores
from jackfield.trainer.role import Role
from jackfield.trainer.rollouts import in_parts, run_rollouts

EVAL = "eval"  #: the set of ``data.eval``; the name of a set is also that of its tasks and its partition


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Evaluates sets of held-out tasks. It deletes their samples, which the controller never sees."""

    role: Role

    @property
    def _sets(self) -> list[str]:
        return [name for name in (EVAL, *self.role.config.evaluation.sets) if name in self.role.tasks]

    def is_due(self, steps_done: int) -> bool:
        """Return whether to evaluate, if there are tasks: at both ends of the run and at due weight syncs."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return bool(self._sets) and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> float:
        """Evaluate and report all sets. Others than ``eval`` have metrics ``SET/NAME``; return the first's score."""
        most, metrics = self.role.config.observe.samples_per_evaluation, dict[str, float]()
        for name in self._sets:
            async with self.role.measure("evaluate", "trainer", version):
                own, samples = await self.evaluate_set(name, version, most)
            prefix = "" if name == EVAL else f"{name}/"
            metrics = {"score": own["score"], **metrics, **{prefix + key: value for key, value in own.items()}}
            shown = tuple(attrs.evolve(each, key=f"{name}/{each.tags['task']}") for each in samples[:most])
            self.role.hooks.emit(SamplesRecorded(step=version, partition=name, samples=shown))
        self.role.hooks.emit(EvaluationEnded(step=version, metrics=metrics))
        return metrics["score"]

    async def evaluate_set(self, name: str, version: int, texts: int) -> tuple[dict[str, float], list[SampleRecord]]:
        """Evaluate the weights of ``version``, which the replicas serve now, on a set.

        Return metrics, and the samples by task and rollout, of which the first ``texts`` have texts. ``failed`` is the
        share of rollouts without a score, which count nowhere else. Raise an error that every task would have,
        ``reward.too-many-failures`` if no task has a score, and ``weights.version`` for a token of other weights.
        """
        own = (config := self.role.config.evaluation).sets.get(name, config)
        async with self.role.rollout_devices.hold("rollout"):
            records = await self._records(name, own, version)
        if all(record.reward is None for record in records):
            where, errors = f"evaluation of weights {version}", (str(record.tags["error"]) for record in records)
            raise without_scores("no task has a score", where, "a score for one task at least", errors)
        keys = [record.key for record in records[:texts] if record.key]
        read = {text.key: text for text in await self.role.records(name, keys, [{}] * len(keys))}
        written = tuple(record.key for record in records if record.key)
        await self.role.workers.backend.delete(DeleteRequest(partition=name, keys=written))
        samples = [attrs.evolve(read.get(one.key, one), reward=one.reward, tags=one.tags) for one in records]
        pairs = [None if one.reward is None else (one.reward, one.tags.get("answer")) for one in samples]
        tasks = [list(filter(None, pairs[at : at + own.rollouts])) for at in range(0, len(pairs), own.rollouts)]
        metrics = metrics_of_tasks(tasks, own.rollouts, own.success)
        metrics |= {
            "score": metrics[f"mean@{own.rollouts}"],
            "failed": pairs.count(None) / len(pairs),
            "response_tokens": sum(one.tags.get("response_tokens", 0) for one in records) / len(records),
            "tasks": float(len(tasks)),
            **said_metrics([record.tags for record in records]),
        }
        return metrics, samples

    async def _records(self, name: str, own: SetSettings, version: int) -> list[SampleRecord]:
        """Run and score a set; return its samples without texts. An error of one rollout only becomes a tag."""
        config, tasks = self.role.config, self.role.tasks[name]
        seed = partial(sampling_seed, config.seed_of(own.sampling), "evaluation", version)
        jobs = [
            RolloutJob(
                group=GroupKey(name, version, number),
                task=task,
                rollouts={each: seed(task.id, each) if each else seed(task.id) for each in range(own.rollouts)},
                sampling=attrs.asdict(own.sampling, recurse=False),
                seconds=config.deadlines.rollout,
                evaluates=True,
                answer=own.answer if own.rollouts > 1 else None,
            )
            for number, task in enumerate(tasks)
        ]
        reports, scoring = dict[tuple[str, int], RolloutReport](), list[asyncio.Task[dict[str, ScoreResult]]]()
        longest = 2 * self.role.score_seconds * len(jobs) * own.rollouts  # if scored in turn

        async def score(ended: Sequence[RolloutReport]) -> None:
            reports.update(((each.group, each.rollout), each) for each in ended)
            keys = [key for each in ended for key in each.keys]
            scoring.append(asyncio.ensure_future(self._scores(name, keys, longest)))

        try:
            await run_rollouts(self.role, jobs, score)
            found = {key: result for scores in await asyncio.gather(*scoring) for key, result in scores.items()}
        finally:
            for each in scoring:
                each.cancel()
        records = []
        for task, report in ((each.task, reports[str(each.group), n]) for each in jobs for n in each.rollouts):
            told: dict[str, Any] = {"task": task.id, "ground_truth": task.ground_truth, "rollout": report.rollout}
            result = ScoreResult(status="failed", error=report.error or "the agent loop returned no sequence")
            if report.keys:
                result, tags = found[report.keys[0]], report.written.tags[0]
                if ends := {tags.get(f"weight_version_{end}", version) for end in ("min", "max")} - {version}:
                    what, where = "an evaluation's sample has tokens of other weights", report.keys[0]
                    raise WeightsError(what, code="weights.version", where=where, expected=version, found=ends)
                told |= {each: tags[each] for each in ("response_tokens", "answer", *said(tags)) if each in tags}
                told |= metric_tags("reward", result.metrics)
            if result.error is not None:
                told["error"] = result.error
            row: Any = {"prompt": "", "response": "", "response_ids": (), "response_mask": ()}
            records.append(SampleRecord(key="".join(report.keys), reward=result.score, tags=told, **row))
        return records

    async def _scores(self, name: str, keys: Sequence[str], longest: float) -> dict[str, ScoreResult]:
        """Score samples; those of a worker that dies repeatedly have failed."""
        wait, found = self.role.clock.wait_for, dict[str, ScoreResult]()

        async def share(worker: RewardWorker, mine: Sequence[str]) -> None:
            async def score(part: Sequence[str]) -> None:
                who = f"the reward worker of samples {some(part)}"
                found.update(await wait(worker.score(name, part), longest, who))

            async for lost, error in in_parts(mine, score, mine, "the scores of held-out samples"):
                found.update(dict.fromkeys(lost, ScoreResult(status="failed", error=str(error))))

        assert self.role.workers.rewards is not None
        shares = self.role.workers.rewards.shares(keys, lambda key: GroupKey.of(group_of(key)).index)
        await asyncio.gather(*(share(worker, mine) for worker, mine in shares))
        return found
