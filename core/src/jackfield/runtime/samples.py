"""The columns and tags of a sample, defined once for all writers and readers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from jackfield.abc.agent import AgentSequence
from jackfield.abc.transfer_queue import Column
from jackfield.data.tasks import Task
from jackfield.queue import BatchMeta
from jackfield.sdk.cells import column_from_rows, json_column

TRAIN = "train"  #: the partition that the trainer consumes


def is_expert(tags: Mapping[str, Any]) -> bool:
    """Return whether a sample comes from an expert: it has no reward and is imitated as it is."""
    return bool(tags.get("expert", False))


def is_baseline(tags: Mapping[str, Any]) -> bool:
    """Return whether a sample is its group's greedy rollout, a baseline, not trained on."""
    return "greedy_rollout" in tags and tags["rollout"] == tags["greedy_rollout"]


def oldest_version(rows: Iterable[Mapping[str, Any]]) -> int:
    """Return the oldest weight version that generated a token; data has no version."""
    return min(int(tags["weight_version_min"]) for tags in rows if "weight_version_min" in tags)


def where(batch: BatchMeta, wanted: Callable[[Mapping[str, Any]], bool]) -> BatchMeta:
    """Return the samples whose tags satisfy ``wanted``."""
    return batch.select(index for index, tags in enumerate(batch.tags) if wanted(tags))


def own(batch: BatchMeta) -> BatchMeta:
    """Return the samples that the policy generated: all but an expert's."""
    return where(batch, lambda tags: not is_expert(tags))


def trained(batch: BatchMeta) -> BatchMeta:
    """Return the samples that a model is trained on: all but baselines."""
    return where(batch, lambda tags: not is_baseline(tags))


def mini_batches(batch: BatchMeta, parts: int, *, whole_groups: bool) -> tuple[BatchMeta, ...]:
    """Split a batch into mini-batches of samples or groups, and spread expert samples evenly.

    Raises:
        QueueError: If the policy has fewer samples (or groups) than ``parts``.
    """
    experts = [index for index, tags in enumerate(batch.tags) if is_expert(tags)]
    split = own(batch).split(parts, whole_groups=whole_groups)
    return tuple(part.joined(batch.select(experts[number::parts])) for number, part in enumerate(split))


def sampling_seed(*place: object) -> int:
    """Return a rollout's sampling seed, the same on every explorer and replica."""
    return int(xxhash.xxh3_64_intdigest("/".join(map(str, place)).encode())) >> 1


def sequence_columns(task: Task, sequences: Sequence[AgentSequence], *, supervised: bool = False) -> dict[str, Column]:
    """Return the columns of samples.

    ``prompt_ids`` and ``response_ids`` are int64, ``response_mask`` is bool, ``rollout_log_probs`` is float32. ``task``
    is JSON for the reward pipeline: the task's record, and the reward if the agent has computed it. Samples that are
    only imitated (``supervised``) have neither log-probs nor a task.
    """
    import torch

    def tokens(name: str, dtype: torch.dtype) -> Column:
        return column_from_rows([torch.tensor(getattr(each, name), dtype=dtype) for each in sequences])

    columns = {
        "prompt_ids": tokens("prompt_ids", torch.int64),
        "response_ids": tokens("response_ids", torch.int64),
        "response_mask": tokens("response_mask", torch.bool),
    }
    if not supervised:
        columns["rollout_log_probs"] = tokens("response_log_probs", torch.float32)
        fields = {"data_source": task.data_source, "ground_truth": task.ground_truth, "extra_info": dict(task.fields)}
        columns["task"] = json_column([{**fields, "reward": each.reward} for each in sequences])
    return columns


def sequence_tags(task: Task, sequence: AgentSequence, rollout: int) -> dict[str, Any]:
    """Return a sample's tags for the controller; only generated ones have weight versions."""
    tags = {
        "task": task.id,
        "rollout": rollout,
        "prompt_tokens": len(sequence.prompt_ids),
        "response_tokens": len(sequence.response_ids),
        "model_tokens": sum(sequence.response_mask),
    }
    if sequence.weight_versions:
        versions = [version for version in sequence.weight_versions if version >= 0]
        tags |= {"weight_version_min": min(versions, default=0), "weight_version_max": max(versions, default=0)}
        tags |= {"step_id": sequence.step_id, "finish_reason": sequence.finish_reason}
    return tags


def metric_tags(kind: str, metrics: Mapping[str, float]) -> dict[str, float]:
    """Return an agent loop's or reward's (``kind``) metrics as tags ``KIND/NAME``."""
    return {f"{kind}/{name}": float(value) for name, value in metrics.items()}


def not_finite(metrics: Mapping[str, object]) -> dict[str, object]:
    """Return the metrics of a plugin that are not finite numbers and so cannot be reported."""
    return {
        name: value
        for name, value in metrics.items()
        if not (isinstance(value, int | float) and abs(value) <= sys.float_info.max)
    }


def said(tags: Mapping[str, Any]) -> dict[str, float]:
    """Return tags of agent loop and reward: ``turns``, ``agent/NAME``, ``reward/NAME``."""
    return {name: value for name, value in tags.items() if name == "turns" or name.startswith(("agent/", "reward/"))}


def said_metrics(rows: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return means of tags: ``agent/turns``, ``agent/NAME/mean``, ``reward/NAME/mean``."""
    values: dict[str, list[float]] = {}
    for tags in rows:
        for name, value in said(tags).items():
            values.setdefault("agent/turns" if name == "turns" else f"{name}/mean", []).append(value)
    return {name: sum(some) / len(some) for name, some in values.items()}


def global_counts(samples: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts by which the losses of a batch are normalised, from the samples' tags.

    Returns:
        Model tokens and sequences of all samples, of the policy's samples (``usual``), and of an expert's.
    """
    kinds = {"usual_": [each for each in samples if not is_expert(each)], "expert_": list(filter(is_expert, samples))}
    counts = {}
    for kind, some in {"": samples, **kinds}.items():
        counts[f"global_{kind}tokens"] = sum(tags["model_tokens"] for tags in some)
        counts[f"global_{kind}sequences"] = len(some)
    return counts
