"""A sample's columns and tags, the same for everybody who writes or reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from jackfield.abc.agent import AgentSequence
from jackfield.abc.transfer_queue import Column
from jackfield.data.tasks import Task
from jackfield.queue import column_from_rows, json_column

__all__ = ["TRAIN", "run_seed", "sequence_columns", "sequence_tags", "supervised_columns", "supervised_tags"]

TRAIN = "train"  #: the partition that the trainer consumes


def run_seed(seed: int, ticket: int, slot: int, attempt: int, run: int) -> int:
    """The sampling seed of one agent run: whichever explorer does it, it is the same."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}/{ticket}/{slot}/{attempt}/{run}".encode())) >> 1


def sequence_columns(task: Task, sequences: Sequence[AgentSequence]) -> dict[str, Column]:
    """``prompt_ids``, ``response_ids`` (int64), ``response_mask`` (bool), ``rollout_log_probs`` (float32), ``task``.

    ``task`` (JSON) is what the reward pipeline reads: the task's record, and the reward that the agent itself knows.
    """
    import torch

    def tokens(values: Sequence[Sequence[int]], dtype: torch.dtype) -> Column:
        return column_from_rows([torch.tensor(value, dtype=dtype) for value in values])

    columns = {
        "prompt_ids": tokens([sequence.prompt_ids for sequence in sequences], torch.int64),
        "response_ids": tokens([sequence.response_ids for sequence in sequences], torch.int64),
        "response_mask": tokens([sequence.response_mask for sequence in sequences], torch.bool),
        "rollout_log_probs": tokens([sequence.response_logprobs for sequence in sequences], torch.float32),  # type: ignore[misc]
        "task": json_column([_task_fields(task, sequence.reward) for sequence in sequences]),
    }
    return columns


def sequence_tags(task: Task, sequence: AgentSequence, run: int) -> dict[str, Any]:
    """What the controller knows of a row."""
    versions = [version for version in sequence.weight_versions if version >= 0]
    return {
        "task": task.id,
        "run": run,
        "step_id": sequence.step_id,
        "prompt_tokens": len(sequence.prompt_ids),
        "response_tokens": len(sequence.response_ids),
        "model_tokens": sum(sequence.response_mask),
        "weight_version_min": min(versions, default=0),
        "weight_version_max": max(versions, default=0),
        "finish_reason": sequence.finish_reason,
    }


def supervised_columns(prompt_ids: Sequence[int], response_ids: Sequence[int]) -> dict[str, Column]:
    """The columns of one row whose response is the data's own answer."""
    import torch

    return {
        "prompt_ids": column_from_rows([torch.tensor(prompt_ids, dtype=torch.int64)]),
        "response_ids": column_from_rows([torch.tensor(response_ids, dtype=torch.int64)]),
        "response_mask": column_from_rows([torch.ones(len(response_ids), dtype=torch.bool)]),
    }


def supervised_tags(task: Task, prompt_ids: Sequence[int], response_ids: Sequence[int]) -> dict[str, Any]:
    """What the controller knows of such a row."""
    return {
        "task": task.id,
        "run": 0,
        "prompt_tokens": len(prompt_ids),
        "response_tokens": len(response_ids),
        "model_tokens": len(response_ids),
    }


def _task_fields(task: Task, reward: float | None) -> Mapping[str, Any]:
    return {
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.fields),
        "reward": reward,
    }
