"""Evaluation: the same agents and rewards on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from jackfield.abc.agent import AgentLoopBase, ChatTokenizer
from jackfield.abc.reward import RewardAgent, ScoreRequest, ScoreResult
from jackfield.clock import Clock
from jackfield.data.tasks import Task
from jackfield.errors import JackfieldError
from jackfield.plugins.hooks import EvaluationEnded, SampleRecord, SamplesRecorded
from jackfield.trainer.explorer import run_agent
from jackfield.trainer.placement import PlacementLease
from jackfield.trainer.reward_pipeline import score_sample
from jackfield.trainer.stages import Stages

__all__ = ["Evaluator"]


@attrs.define(kw_only=True, eq=False)
class Evaluator:
    """Runs every held-out task once and tells the hooks the mean score."""

    tasks: Sequence[Task]
    make_agent: Callable[[], AgentLoopBase]
    reward: RewardAgent
    tokenizer: ChatTokenizer
    placement: PlacementLease
    clock: Clock
    stages: Stages
    hooks: Any
    sampling: Mapping[str, Any]
    run_seconds: float
    score_seconds: float
    recorded: int = 16  #: samples shown in the table

    async def evaluate(self, version: int) -> dict[str, float]:
        """Evaluate the weights ``version`` that the replicas serve now.

        Returns:
            ``score``: the mean over all tasks whose score is known; ``failed``: the fraction without one;
            ``response_tokens``: mean length.
        """
        async with self.stages.measure("evaluate", "trainer", version), self.placement.hold("rollout"):
            outcomes = await asyncio.gather(*(self._run(task) for task in self.tasks))
        scored = [record for record in outcomes if record.reward is not None]
        metrics = {
            "score": sum(record.reward or 0.0 for record in scored) / max(len(scored), 1),
            "failed": 1.0 - len(scored) / max(len(outcomes), 1),
            "response_tokens": sum(len(record.response_ids) for record in outcomes) / max(len(outcomes), 1),
            "tasks": float(len(outcomes)),
        }
        shown = tuple(outcomes[: self.recorded])
        self.hooks.samples_recorded(event=SamplesRecorded(step=version, partition="eval", samples=shown))
        self.hooks.evaluation_ended(event=EvaluationEnded(step=version, metrics=metrics))
        return metrics

    async def _run(self, task: Task) -> SampleRecord:
        try:
            output = await run_agent(self.make_agent(), self.sampling, task, self.clock, self.run_seconds)
            sequence = output.sequences[-1] if output.sequences else None
        except JackfieldError as error:
            sequence, reason = None, str(error)
        else:
            reason = "the agent loop returned no sequence"
        if sequence is None:
            return _record(task, self.tokenizer, (), (), (), ScoreResult(status="failed", error=reason))
        result = ScoreResult(score=sequence.reward)
        if sequence.reward is None:
            request = ScoreRequest(
                data_source=task.data_source,
                solution_str=self.tokenizer.decode(sequence.response_ids),
                ground_truth=task.ground_truth,
                extra_info=task.fields,
                prompt_str=self.tokenizer.decode(sequence.prompt_ids),
                response_ids=sequence.response_ids,
                idempotency_key=f"eval/{task.id}",
                deadline_seconds=self.score_seconds,
            )
            result = await score_sample(self.reward, request, self.clock)
        return _record(task, self.tokenizer, sequence.prompt_ids, sequence.response_ids, sequence.response_mask, result)


def _record(
    task: Task,
    tokenizer: ChatTokenizer,
    prompt_ids: tuple[int, ...],
    response_ids: tuple[int, ...],
    response_mask: tuple[int, ...],
    result: ScoreResult,
) -> SampleRecord:
    tags = {"task": task.id, "ground_truth": task.ground_truth}
    return SampleRecord(
        key=f"eval/{task.id}",
        prompt=tokenizer.decode(prompt_ids, skip_special_tokens=False),
        response=tokenizer.decode(response_ids, skip_special_tokens=False),
        reward=result.score if result.status == "ok" else None,
        response_ids=response_ids,
        response_mask=response_mask,
        tags=tags if result.error is None else {**tags, "error": result.error},
    )
