"""The evaluation of held-out tasks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
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
from jackfield.runtime.rewards import RewardWorker
from jackfield.runtime.samples import metric_tags, said, said_metrics, sampling_seed
from jackfield.runtime.workers import RolloutJob
from jackfield.trainer.role import Role
from jackfield.trainer.rollouts import in_parts, run_rollouts, without_scores

EVAL = "eval"  #: the set of ``data.eval``; tasks and partition of the set NAME are called ``eval-NAME``


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Evaluates sets of held-out tasks. It deletes their samples, which the controller never sees."""

    role: Role

    @property
    def sets(self) -> dict[str, str]:
        """The names of the sets of held-out tasks, and of their tasks and partitions."""
        names = {EVAL: EVAL, **{name: f"{EVAL}-{name}" for name in self.role.config.evaluation.sets}}
        return {name: place for name, place in names.items() if place in self.role.tasks}

    def is_due(self, steps_done: int) -> bool:
        """Return whether to evaluate, if there are tasks: at both ends of the run and at due weight syncs."""
        schedule, every = self.role.schedule, self.role.config.evaluation.every
        return bool(self.sets) and (steps_done in (0, schedule.steps) or schedule.is_due(every, steps_done))

    async def evaluate(self, version: int) -> None:
        """Evaluate all sets as :meth:`evaluate_set` does, and report it to the hooks.

        Metrics of other sets than ``eval`` have the prefix ``NAME/``; ``score`` is that of the first set.
        """
        most, metrics = self.role.config.observe.samples_per_evaluation, dict[str, float]()
        for name, place in self.sets.items():
            async with self.role.measure("evaluate", "trainer", version):
                own, samples = await self.evaluate_set(name, version, most)
            metrics = {"score": own["score"], **metrics}
            metrics |= own if name == EVAL else {f"{name}/{key}": value for key, value in own.items()}
            shown = tuple(attrs.evolve(each, key=f"{place}/{each.tags['task']}") for each in samples[:most])
            self.role.hooks.emit(SamplesRecorded(step=version, partition=place, samples=shown))
        self.role.hooks.emit(EvaluationEnded(step=version, metrics=metrics))

    async def evaluate_set(self, name: str, version: int, texts: int) -> tuple[dict[str, float], list[SampleRecord]]:
        """Evaluate the weights that the replicas serve now, which are those of ``version``, on a set.

        Return metrics, and the samples by task and rollout; with one rollout per task, only the first ``texts`` have
        texts. There are the metrics of :func:`~jackfield.algorithms.repeated.metrics_of_tasks`, ``score`` (the mean),
        ``failed`` (the share of rollouts without a score, which count nowhere else) and ``response_tokens`` (the mean).
        An error that every task would have is raised; so are ``reward.too-many-failures`` if no task has a score, and
        ``weights.version`` if a token is of another version.
        """
        place, config = self.sets[name], self.role.config.evaluation
        own = config.sets.get(name, config)
        async with self.role.rollout_devices.hold("rollout"):
            records = await self._records(place, own, version)
        if all(record.reward is None for record in records):
            where, errors = f"evaluation of weights {version}", (str(record.tags["error"]) for record in records)
            raise without_scores("no task has a score", where, "a score for one task at least", errors)
        written = [record.key for record in records if record.key]
        keys = written if own.rollouts > 1 else [record.key for record in records[:texts] if record.key]
        read = {text.key: text for text in await self.role.records(place, keys, [{}] * len(keys))}
        await self.role.workers.backend.delete(DeleteRequest(partition=place, keys=tuple(written)))
        samples = [attrs.evolve(read.get(one.key, one), reward=one.reward, tags=one.tags) for one in records]
        scored: dict[str, list[tuple[float, str | None]]] = {}
        for one in samples:
            if one.reward is not None:
                scored.setdefault(one.tags["task"], []).append((one.reward, _answer(one.response, own.answer)))
        metrics = metrics_of_tasks(list(scored.values()), own.rollouts, own.success)
        metrics |= {
            "score": metrics[f"mean@{own.rollouts}"],
            "failed": 1.0 - sum(map(len, scored.values())) / len(records),
            "response_tokens": sum(one.tags.get("response_tokens", 0) for one in records) / len(records),
            "tasks": float(len(records) // own.rollouts),
            **said_metrics([record.tags for record in records]),
        }
        return metrics, samples

    async def _records(self, place: str, own: SetSettings, version: int) -> list[SampleRecord]:
        """Run and score a set; return its samples without texts. An error of one rollout only becomes a tag."""
        config, tasks = self.role.config, self.role.tasks[place]
        seed = partial(sampling_seed, config.seed_of(own.sampling), "evaluation", version)
        jobs = [
            RolloutJob(
                group=GroupKey(place, version, number),
                task=task,
                rollouts={each: seed(task.id, each) if each else seed(task.id) for each in range(own.rollouts)},
                sampling=attrs.asdict(own.sampling, recurse=False),
                seconds=config.deadlines.rollout,
                evaluates=True,
            )
            for number, task in enumerate(tasks)
        ]
        reports, scoring = dict[tuple[str, int], RolloutReport](), list[asyncio.Task[dict[str, ScoreResult]]]()
        longest = 2 * self.role.score_seconds * len(jobs) * own.rollouts  # if scored in turn

        async def score(ended: Sequence[RolloutReport]) -> None:
            reports.update(((each.group, each.rollout), each) for each in ended)
            keys = [key for each in ended for key in each.keys]
            scoring.append(asyncio.ensure_future(self._scores(place, keys, longest)))

        try:
            await run_rollouts(self.role, jobs, score)
            found = {key: result for scores in await asyncio.gather(*scoring) for key, result in scores.items()}
        finally:
            for each in scoring:
                each.cancel()
        records = []
        for job, number in [(each, number) for each in jobs for number in each.rollouts]:
            report = reports[str(job.group), number]
            told: dict[str, Any] = {"task": job.task.id, "ground_truth": job.task.ground_truth, "rollout": number}
            result = ScoreResult(status="failed", error=report.error or "the agent loop returned no sequence")
            if report.keys:
                result, tags = found[report.keys[0]], report.written.tags[0]
                _check_version(report.keys[0], tags, version)
                told |= {"response_tokens": tags["response_tokens"], **{name: tags[name] for name in said(tags)}}
                told |= metric_tags("reward", result.metrics)
            if result.error is not None:
                told["error"] = result.error
            row: Any = {"prompt": "", "response": "", "response_ids": (), "response_mask": ()}
            records.append(SampleRecord(key="".join(report.keys), reward=result.score, tags=told, **row))
        return records

    async def _scores(self, place: str, keys: Sequence[str], longest: float) -> dict[str, ScoreResult]:
        """Score samples; those of a worker that dies repeatedly have failed."""
        assert self.role.workers.rewards is not None
        shares = self.role.workers.rewards.shares(keys, lambda key: GroupKey.of(group_of(key)).index)
        found = await asyncio.gather(*(self._share(worker, place, mine, longest) for worker, mine in shares))
        return {key: result for scores in found for key, result in scores.items()}

    async def _share(
        self, worker: RewardWorker, place: str, keys: Sequence[str], longest: float
    ) -> dict[str, ScoreResult]:
        wait, found = self.role.clock.wait_for, dict[str, ScoreResult]()

        async def score(keys: Sequence[str]) -> None:
            found.update(await wait(worker.score(place, keys), longest, f"the reward worker of samples {some(keys)}"))

        async for lost, error in in_parts(keys, score, keys, "the scores of held-out samples"):
            found |= dict.fromkeys(lost, ScoreResult(status="failed", error=str(error)))
        return found


def _answer(response: str, pattern: str | None) -> str | None:
    """Return the answer of a response, or None if the pattern does not match."""
    matches = [response.strip()] if pattern is None else re.findall(pattern, response)
    return "".join(matches[-1]) if matches else None


def _check_version(key: str, tags: Mapping[str, Any], version: int) -> None:
    """Refuse a sample with a token of other weights."""
    found = {tags[f"weight_version_{end}"] for end in ("min", "max") if f"weight_version_{end}" in tags}
    if found - {version}:
        what, expected = "a sample of an evaluation has tokens of other weights", f"weight version {version}"
        raise WeightsError(what, code="weights.version", where=key, expected=expected, found=sorted(found))
