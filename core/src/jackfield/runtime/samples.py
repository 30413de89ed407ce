"""A sample's columns and tags, the same for everybody who writes or reads them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import xxhash

from jackfield.abc.agent import AgentLoopOutput, AgentSequence
from jackfield.abc.transfer_queue import Column
from jackfield.data.tasks import Task
from jackfield.errors import ConfigError
from jackfield.queue import BatchMeta, column_from_rows, json_column

#: Tokens of an answer that is taught, and their mask.
_Answer: TypeAlias = tuple[Sequence[int], Sequence[int]]

TRAIN = "train"  #: the partition that the trainer consumes


def is_expert(tags: Mapping[str, Any]) -> bool:
    """Return whether a row was written by an expert: it has no reward and is learnt from as it is."""
    return bool(tags.get("expert", False))


def is_baseline(tags: Mapping[str, Any]) -> bool:
    """Return whether a row is its group's greedy rollout: its reward is a baseline, and it is not trained on."""
    return "greedy_rollout" in tags and tags["rollout"] == tags["greedy_rollout"]


def oldest_version(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the oldest weight version that made a token. Samples that this run did not generate have none."""
    return min(int(tags["weight_version_min"]) for tags in rows if "weight_version_min" in tags)


def where(batch: BatchMeta, wanted: Callable[[Mapping[str, Any]], bool]) -> BatchMeta:
    """Return the samples whose tags are wanted."""
    return batch.select(index for index, tags in enumerate(batch.tags) if wanted(tags))


def own(batch: BatchMeta) -> BatchMeta:
    """Return the samples that the policy generated: all but an expert's."""
    return where(batch, lambda tags: not is_expert(tags))


def trained(batch: BatchMeta) -> BatchMeta:
    """Return the samples that a model is trained on: all but baselines."""
    return where(batch, lambda tags: not is_baseline(tags))


@contextmanager
def naming_samples(batch: BatchMeta) -> Iterator[None]:
    """An error of an algorithm that names a row of ``batch`` names the sample."""
    try:
        yield
    except ConfigError as error:
        number, comma, rest = str(error.where).removeprefix("row ").partition(",")
        if error.code == "algorithm.not-finite" and number.isdigit():
            error.where = f"sample {batch.keys[int(number)]}{comma}{rest}"
        raise


def mini_batches(batch: BatchMeta, parts: int, *, whole_groups: bool) -> tuple[BatchMeta, ...]:
    """The batches of the optimizer steps: consecutive rows, or groups, and an expert's rows dealt out to all of them.

    Raises:
        QueueError: with fewer rows (or groups) of the policy than parts.
    """
    experts = [index for index, tags in enumerate(batch.tags) if is_expert(tags)]
    split = own(batch).split(parts, whole_groups=whole_groups)
    return tuple(part.joined(batch.select(experts[number::parts])) for number, part in enumerate(split))


def rollout_seed(seed: int, ticket: int, slot: int, attempt: int, run: int) -> int:
    """The sampling seed of one rollout: whichever explorer does it, it is the same."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}/{ticket}/{slot}/{attempt}/{run}".encode())) >> 1


def evaluation_seed(seed: int, version: int, task_id: str) -> int:
    """The sampling seed of a held-out task: no replica has to remember what it has drawn before."""
    return int(xxhash.xxh3_64_intdigest(f"{seed}/evaluation/{version}/{task_id}".encode())) >> 1


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
        "rollout_log_probs": tokens([sequence.response_log_probs for sequence in sequences], torch.float32),  # type: ignore[misc]
        "task": json_column([_task_fields(task, sequence.reward) for sequence in sequences]),
    }
    return columns


def sequence_tags(task: Task, sequence: AgentSequence, run: int) -> dict[str, Any]:
    """Return what the controller knows of a row."""
    versions = [version for version in sequence.weight_versions if version >= 0]
    return {
        "task": task.id,
        "rollout": run,
        "step_id": sequence.step_id,
        "prompt_tokens": len(sequence.prompt_ids),
        "response_tokens": len(sequence.response_ids),
        "model_tokens": sum(sequence.response_mask),
        "weight_version_min": min(versions, default=0),
        "weight_version_max": max(versions, default=0),
        "finish_reason": sequence.finish_reason,
    }


def agent_tags(output: AgentLoopOutput) -> dict[str, Any]:
    """Return what an agent loop says of its rollout, for each of its rows: ``turns`` and ``agent/NAME``."""
    return {"turns": output.num_turns, **metric_tags("agent", output.metrics)}


def metric_tags(kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics that an agent loop or a reward (``kind``) gives a row, as tags: ``KIND/NAME``."""
    return {f"{kind}/{name}": float(value) for name, value in metrics.items()}


def not_finite(metrics: Mapping[str, object]) -> dict[str, object]:
    """Those of a plugin's metrics that are no finite numbers, which no step could show."""
    return {
        name: value
        for name, value in metrics.items()
        if not (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
    }


def said(tags: Mapping[str, Any]) -> dict[str, float]:
    """The tags that an agent loop and a reward have given to a row: ``turns``, ``agent/NAME`` and ``reward/NAME``."""
    return {name: value for name, value in tags.items() if name == "turns" or name.startswith(("agent/", "reward/"))}


def said_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Means over rows: ``agent/turns``, and ``agent/NAME/mean`` and ``reward/NAME/mean`` over rows that have them."""
    values: dict[str, list[float]] = {}
    for tags in rows:
        for name, value in said(tags).items():
            values.setdefault("agent/turns" if name == "turns" else f"{name}/mean", []).append(value)
    return {name: sum(some) / len(some) for name, some in values.items()}


def supervised_columns(task: Task, prompt_ids: Sequence[int], answers: Sequence[_Answer]) -> dict[str, Column]:
    """The columns of rows whose responses are the task's own answers."""
    import torch

    prompt = torch.tensor(prompt_ids, dtype=torch.int64)
    return {
        "prompt_ids": column_from_rows([prompt] * len(answers)),
        "response_ids": column_from_rows([torch.tensor(token_ids, dtype=torch.int64) for token_ids, _ in answers]),
        "response_mask": column_from_rows([torch.tensor(mask, dtype=torch.bool) for _, mask in answers]),
    }


def expert_columns(task: Task, prompt_ids: Sequence[int], answers: Sequence[_Answer]) -> dict[str, Column]:
    """Return the same among sampled rows: these were not sampled, so their log-probs are 0, and they have no score."""
    import torch

    return {
        **supervised_columns(task, prompt_ids, answers),
        "rollout_log_probs": column_from_rows([torch.zeros(len(token_ids)) for token_ids, _ in answers]),
        "task": json_column([_task_fields(task, reward=0.0)] * len(answers)),
    }


def supervised_tags(task: Task, prompt_ids: Sequence[int], mask: Sequence[int]) -> dict[str, Any]:
    """Return what the controller knows of such a row."""
    return {
        "task": task.id,
        "rollout": 0,
        "prompt_tokens": len(prompt_ids),
        "response_tokens": len(mask),
        "model_tokens": sum(mask),
    }


def global_counts(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """By what the losses of a batch are normalised, from its rows' tags: model tokens and sequences of all rows, of
    those that the policy generated (``usual``) and of an expert's.
    """
    experts = [tags for tags in rows if is_expert(tags)]
    tokens, expert_tokens = (sum(tags["model_tokens"] for tags in some) for some in (rows, experts))
    return {
        "global_tokens": tokens,
        "global_sequences": len(rows),
        "global_usual_tokens": tokens - expert_tokens,
        "global_usual_sequences": len(rows) - len(experts),
        "global_expert_tokens": expert_tokens,
        "global_expert_sequences": len(experts),
    }


def _task_fields(task: Task, reward: float | None) -> Mapping[str, Any]:
    return {
        "data_source": task.data_source,
        "ground_truth": task.ground_truth,
        "extra_info": dict(task.fields),
        "reward": reward,
    }
