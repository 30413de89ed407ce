"""The columns and tags of a sample, and the advantage worker, which computes columns that depend on a whole batch.

The advantage worker takes metadata and returns plain numbers, so that it can run in another process than the trainer.
"""

from __future__ import annotations

import json
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import xxhash

from jackfield.abc.agent import AgentSequence
from jackfield.abc.transfer_queue import Column, TransferQueueBackend
from jackfield.algorithms import advantages, part, prepare
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.algorithms.shaping import kl_in_reward
from jackfield.algorithms.tensors import Groups, naming_rows
from jackfield.data.formats import Task
from jackfield.queue import Values
from jackfield.queue.meta import BatchMeta, Lease, Written
from jackfield.runtime.tags import own_rewards
from jackfield.sdk.arrays import cell as arrays_cell
from jackfield.sdk.cells import Cell, dense_column, join, offsets_of, rows_of, split
from jackfield.sdk.jagged import padded_rows

if TYPE_CHECKING:
    import torch

_INT64, _INT32, _BOOL, _FLOAT32 = (f'["jagged","{dtype}",[]]' for dtype in ("int64", "int32", "bool", "float32"))
_JSON = '["json","uint8",[]]'
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode

TRAIN = "train"  #: the partition that the trainer consumes
#: The columns that are written once while a batch is leased. Others are written again for each mini-batch.
_WRITTEN_ONCE = {
    *("prompt_ids", "response_ids", "response_mask", "rollout_log_probs", "reward", "reward_dimensions", "rewards"),
    *("ref_log_probs", "old_log_probs", "values", "advantages", "returns", "rollout_weights", "expert_mask"),
    *("weight_versions", "multi_modal_inputs"),
}


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

    Fewer samples (or groups) of the policy than ``parts`` are refused with a ``QueueError``.
    """
    experts = [index for index, tags in enumerate(batch.tags) if is_expert(tags)]
    split = (own(batch) if experts else batch).split(parts, whole_groups=whole_groups)
    return tuple(each.joined(batch.select(experts[number::parts])) for number, each in enumerate(split))


def sampling_seed(*place: object) -> int:
    """Return a rollout's sampling seed, the same on every explorer and replica."""
    return int(xxhash.xxh3_64_intdigest("/".join(map(str, place)).encode())) >> 1


def sequence_cells(
    task: Task,
    sequence: AgentSequence,
    texts: dict[float | None, bytes],
    rollout: Mapping[str, Any],
    *,
    supervised: bool,
    versions: bool,
    arrays: bool = False,
) -> dict[str, Cell]:
    """Return the values of a sample by column.

    ``prompt_ids`` and ``response_ids`` are int64, ``response_mask`` is bool, ``rollout_log_probs`` is float32. ``task``
    is JSON for the reward pipeline: the task's record, the reward if the agent has computed it, and what ``rollout``
    says of the agent loop, if anything. ``texts`` keeps it for further samples of the task, by reward. Samples that are
    only imitated (``supervised``) have neither log-probs nor a task. With ``versions``, ``weight_versions`` is int32,
    -1 on tokens that are not the model's; with ``arrays``, ``multi_modal_inputs`` is uint8. Other types raise what
    ``array`` and JSON do.
    """
    cells: dict[str, Cell] = {
        "prompt_ids": (_INT64, array("q", tuple(sequence.prompt_ids)).tobytes()),
        "response_ids": (_INT64, array("q", tuple(sequence.response_ids)).tobytes()),
        "response_mask": (_BOOL, bytes(sequence.response_mask)),
    }
    if arrays:
        cells["multi_modal_inputs"] = arrays_cell(sequence.multi_modal_inputs)
    if not supervised:
        cells["rollout_log_probs"] = _FLOAT32, array("f", tuple(sequence.response_log_probs)).tobytes()
        rewards = own_rewards(sequence)
        if rollout or rewards or (text := texts.get(sequence.reward)) is None:
            record: dict[str, Any] = {
                "data_source": task.data_source,
                "ground_truth": task.ground_truth,
                "extra_info": task.fields,
            }
            record |= {"reward": sum(rewards) if rewards else sequence.reward}
            record |= {"token_rewards": rewards} if rewards else {}
            text = _encode({**record, **({"rollout": rollout} if rollout else {})}).encode()
            if not rollout and not rewards:
                texts[sequence.reward] = text
        cells["task"] = _JSON, text
        if versions:
            made = zip(sequence.weight_versions or repeat(-1), sequence.response_mask, strict=False)
            cells["weight_versions"] = _INT32, array("i", [each if mask else -1 for each, mask in made]).tobytes()
    return cells


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
        versions = {version for version in set(sequence.weight_versions) if version >= 0} or {0}
        tags["weight_version_min"], tags["weight_version_max"] = min(versions), max(versions)
        tags["step_id"], tags["finish_reason"] = sequence.step_id, sequence.finish_reason
    if sequence.relation is not None:
        tags["parent"], tags["relation"] = sequence.parent, sequence.relation
    if sequence.name:
        tags["agent_name"] = sequence.name
    return tags


def global_counts(samples: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the counts by which the losses of a batch are normalised, from the samples' tags.

    These are model tokens and sequences of all samples, of the policy's samples (``usual``), and of an expert's.
    """
    experts, counts = list(filter(is_expert, samples)), {}
    for kind, some in {"": samples, "expert_": experts}.items():
        counts[f"global_{kind}tokens"] = sum(tags["model_tokens"] for tags in some)
        counts[f"global_{kind}sequences"] = len(some)
    for what in ("tokens", "sequences"):
        counts[f"global_usual_{what}"] = counts[f"global_{what}"] - counts[f"global_expert_{what}"]
    return counts


class StepValues(Values):
    """Values of the batch that a trainer works on, for all engines and the advantage worker of one process.

    Each value is read once, and what was written here is not read. A batch under other leases ends what was kept, so
    samples that are generated or chosen again are read again; a further part of the same step does not.
    """

    def __init__(self, backend: TransferQueueBackend) -> None:
        super().__init__(backend)
        self._leases: set[Lease] = set()
        self._step: int | None = None
        self._cells: dict[str, dict[str, Cell]] = {}  #: by column and key

    async def read(self, meta: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        """Read columns of a batch in its order, those that are not kept from the backend."""
        self._begin(meta)
        missing: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            kept = self._cells.get(name, {}).keys()
            missing.setdefault(tuple(at for at, key in enumerate(meta.keys) if key not in kept), []).append(name)
        for rows, some in missing.items():
            if rows:
                part = meta.select(rows)
                self._keep(part, await super().read(part, some))
        found = {name: join(name, list(map(self._cells[name].__getitem__, meta.keys))) for name in names}
        for name in set(names) - _WRITTEN_ONCE:
            del self._cells[name]
        return found

    async def write(self, meta: BatchMeta, columns: Mapping[str, Column]) -> Written:
        """Write columns of a batch, and keep them; those that are written again until they are read."""
        written = await super().write(meta, columns)
        self._begin(meta)
        self._keep(meta, columns)
        return written

    def _begin(self, meta: BatchMeta) -> None:
        if not self._leases.issuperset(meta.leases):
            if meta.step is None or meta.step != self._step:
                self._leases, self._cells = set(), {}
            self._leases.update(meta.leases)
        self._step = meta.step

    def _keep(self, meta: BatchMeta, columns: Mapping[str, Column]) -> None:
        for name, column in columns.items():
            text, contents = split(column)
            self._cells.setdefault(name, {}).update(zip(meta.keys, zip(repeat(text), contents), strict=True))


class AdvantageWorker:
    """Runs the algorithm's registered components over the samples of a batch."""

    def __init__(self, values: Values, algorithm: ResolvedAlgorithm) -> None:
        self._values, self._algorithm = values, algorithm

    async def estimate(
        self, batch: BatchMeta, kl_coefficient: float = 0.0, version: int | None = None
    ) -> tuple[dict[str, float], Written]:
        """Write ``advantages`` and ``returns``, float32 per response token, and related columns.

        ``batch`` has samples of the policy and of an expert, and greedy rollouts that serve as baselines.
        ``kl_coefficient`` is that of the KL penalty in the reward; ``version`` that of the engine's weights, for the
        staleness of tokens whose weight versions are kept. Return metrics (statistics of rewards and
        advantages, ``reward/kl``, diagnostics of the off-policy correction), and what was written for all samples but
        baselines. Expert samples have advantage 0 and weight 1.
        """
        algorithm, target = self._algorithm, trained(batch)
        assert algorithm.advantages is not None
        rows = await self._read(own(target), keeps_versions=version is not None)
        totals = rows.token_rewards.sum(-1)
        metrics = {f"reward/{name}": float(getattr(totals, name)()) for name in ("mean", "min", "max")}
        metrics["reward/std"] = float(totals.std()) if len(totals) > 1 else 0.0
        totals_of = defaultdict[str, list[float]](list)
        for group, total in zip(rows.batch.groups, totals.tolist(), strict=True):
            totals_of[group].append(total)
        if compared := [each for each in totals_of.values() if len(each) > 1]:
            metrics["groups/without_signal"] = sum(min(each) == max(each) for each in compared) / len(compared)
        token_rewards, inputs = self._shaped(rows, kl_coefficient, metrics), await self._inputs(batch, rows)
        with naming_rows([f"sample {key}" for key in rows.batch.keys]):
            inputs |= {"token_rewards": token_rewards, "response_mask": rows.mask, **algorithm.advantages_options}
            estimated, returns = advantages(algorithm.advantages, **inputs)
        if algorithm.sequence_weight == "rollout":
            estimated = estimated / Groups(inputs["group_ids"], inputs["rollout_ids"]).sizes[:, None]
        metrics["advantages/abs_mean"] = float(estimated.abs().mean())
        generated = rows.sizes.new_tensor([not is_expert(tags) for tags in target.tags]).bool()
        sizes = [int(tags["response_tokens"]) for tags in target.tags]

        def column(values: torch.Tensor, experts: float = 0.0) -> Column:
            whole = rows.token_rewards.new_full((len(sizes), max(*sizes, values.shape[1])), experts)
            whole[generated, : values.shape[1]] = values.float()
            return _jagged(whole, sizes)

        columns = {"advantages": column(estimated), "returns": column(returns)}
        if algorithm.correction is not None:
            old, rollout = rows.padded("old_log_probs"), rows.padded("rollout_log_probs")
            staleness = None
            if version is not None:
                staleness = version - rows.padded("weight_versions")
                metrics["staleness/tokens/mean"] = float(staleness[rows.mask].float().mean())
            weights, kept, diagnostics = algorithm.correction.weights(old, rollout, rows.mask, staleness)
            columns["rollout_weights"] = column(weights.masked_fill(kept == 0, 0.0), experts=1.0)
            metrics |= {f"correction/{name}": float(value) for name, value in diagnostics.items()}
        if "rewards" in algorithm.loss_columns:
            columns["rewards"] = dense_column(totals.new_zeros(len(sizes)).masked_scatter(generated, totals))
        if "expert_mask" in algorithm.loss_columns:
            columns["expert_mask"] = dense_column(~generated)
        return metrics, await self._values.write(target, columns)

    async def prepare(self, batch: BatchMeta) -> Written:
        """Write loss inputs of the whole batch (see :func:`jackfield.algorithms.prepare`).

        ``batch`` is the mini-batch of one optimizer step. Its column ``log_probs`` was computed before that step.
        """
        algorithm, loss = self._algorithm, part("loss", self._algorithm.loss)
        names = algorithm.prepared_columns
        columns = await self._values.read(batch, ("response_mask", *names.values()))
        mask, numbers = columns["response_mask"], _numbers(batch.groups)
        given: dict[str, Any] = {"response_mask": _padded(mask), "group_ids": numbers, "pair_ids": numbers}
        given |= {name: _padded(columns[column]) for name, column in names.items()}
        given |= {name: value for name, value in algorithm.loss_options.items() if name in loss.options}
        sizes, made = list(map(len, rows_of(mask))), prepare(algorithm.loss, **given).items()
        values = {name: _jagged(each, sizes) if each.dim() == 2 else dense_column(each) for name, each in made}
        return await self._values.write(batch, values)

    async def _read(self, batch: BatchMeta, *, keeps_versions: bool) -> _Responses:
        algorithm = self._algorithm
        chosen = part("advantages", str(algorithm.advantages))
        taken = chosen.inputs
        names = {"response_mask", "reward", *({"values", "reward_dimensions"}.intersection(chosen.needs))}
        if algorithm.kl_in_reward is not None:
            names |= {algorithm.old_log_probs, "ref_log_probs"}
        if "old_log_probs" in taken:
            names.add(algorithm.old_log_probs)
        if algorithm.correction is not None:
            names |= {"old_log_probs", "rollout_log_probs", *(("weight_versions",) if keeps_versions else ())}
        if "anchor_ids" in taken:
            names.add("prompt_ids")
        return _Responses(batch, await self._values.read(batch, sorted(names)))

    async def _inputs(self, batch: BatchMeta, rows: _Responses) -> dict[str, Any]:
        """Return all inputs for estimators in addition to rewards; each takes what it needs."""
        tags, columns, old = rows.batch.tags, rows.columns, self._algorithm.old_log_probs
        offered: dict[str, Any] = {
            "group_ids": _numbers(rows.batch.groups),
            "rollout_ids": rows.sizes.new_tensor([int(one.get("rollout", 0)) for one in tags]),
            "step_ids": rows.sizes.new_tensor([int(one.get("step_id", 0)) for one in tags]),
        }
        offered |= {
            name: rows.padded(key) for name, key in {"values": "values", "old_log_probs": old}.items() if key in columns
        }
        if "prompt_ids" in columns:  # a step's state is the context that the model saw
            offered["anchor_ids"] = _numbers([tuple(prompt.tolist()) for prompt in rows_of(columns["prompt_ids"])])
        if "reward_dimensions" in columns:
            offered["reward_dimensions"] = _padded(columns["reward_dimensions"])
        if greedy := where(batch, is_baseline):
            baselines = _Responses(greedy, await self._values.read(greedy, ("response_mask", "reward")))
            totals = dict.fromkeys(greedy.groups, 0.0)
            for group, total in zip(greedy.groups, baselines.token_rewards.sum(-1).tolist(), strict=True):
                totals[group] += total
            offered["baseline_rewards"] = rows.token_rewards.new_tensor([totals[group] for group in rows.batch.groups])
        return offered

    def _shaped(self, rows: _Responses, kl_coefficient: float, metrics: dict[str, float]) -> torch.Tensor:
        """Return shaped token rewards; changes of a response's reward go to its last token."""
        algorithm, rewards = self._algorithm, rows.token_rewards
        if algorithm.shaping.active:
            totals = rewards.sum(-1)
            change = algorithm.shaping.shape(totals, rows.sizes) - totals
            rewards = rewards.scatter_add(1, rows.last, change.unsqueeze(-1))
        if algorithm.kl_in_reward is not None:
            old, reference = rows.padded(algorithm.old_log_probs), rows.padded("ref_log_probs")
            rewards, mean = kl_in_reward(
                rewards, old, reference, rows.mask, coefficient=kl_coefficient, estimator=algorithm.kl_in_reward
            )
            metrics |= {"reward/kl": float(mean), "reward/kl_coefficient": kl_coefficient}
        if rewards is not rows.token_rewards:
            metrics["reward/shaped_mean"] = float(rewards.sum(-1).mean())
        return rewards


class _Responses:
    """Columns of samples, padded on request."""

    def __init__(self, batch: BatchMeta, columns: Mapping[str, Column]) -> None:
        import torch

        self.batch, self.columns = batch, columns
        self.mask = _padded(columns["response_mask"])  #: bool ``[B, T]``
        self.sizes = torch.tensor([int(tags["response_tokens"]) for tags in batch.tags])  #: int64 ``[B]``
        self.last = (self.sizes - 1).clamp(min=0).unsqueeze(-1)  #: int64 ``[B, 1]``: each response's last token
        self.token_rewards = self._rewards()  #: float32 ``[B, T]``

    def padded(self, name: str) -> torch.Tensor:
        """Return a column padded to ``[B, T]``."""
        return _padded(self.columns[name], self.mask.shape[1])

    def _rewards(self) -> torch.Tensor:
        """Return token rewards; a sample's scalar reward is placed on the last token."""
        rewards = self.columns["reward"]
        dense = rewards.values.new_zeros(self.mask.shape)
        if rewards.offsets is None:
            return dense.scatter(1, self.last, rewards.values.unsqueeze(-1))
        per_token, single = self.padded("reward"), (rewards.offsets.diff() == 1).unsqueeze(-1)
        return dense.scatter(1, self.last, per_token[:, :1]).where(single, per_token)


def _padded(column: Column, length: int | None = None) -> torch.Tensor:
    return padded_rows(rows_of(column), length=length)


def _jagged(dense: torch.Tensor, sizes: Sequence[int]) -> Column:
    """Return ``[B, T]`` as a jagged column without the values after a row's size."""
    import torch

    kept = torch.arange(dense.shape[1]) < torch.tensor(sizes)[:, None]
    return Column(values=dense.detach()[kept], offsets=offsets_of(sizes))


def _numbers(names: Sequence[Any]) -> torch.Tensor:
    """Return int64 ``[B]`` with equal numbers for equal names."""
    import torch

    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])
