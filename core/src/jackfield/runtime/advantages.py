"""The advantage worker, which computes columns that depend on a whole batch.

It takes metadata and returns plain numbers, so that it can run in another process than the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jackfield.algorithms import advantages, kl_in_reward, naming_rows, part, prepare
from jackfield.algorithms.settings import ResolvedAlgorithm
from jackfield.queue import BatchMeta, Values
from jackfield.queue.meta import Written
from jackfield.runtime.samples import is_baseline, is_expert, own, trained, where
from jackfield.sdk.cells import dense_column, from_nested, to_nested
from jackfield.sdk.jagged import from_padded, lengths, to_padded

if TYPE_CHECKING:
    import torch

    from jackfield.abc.transfer_queue import Column


class AdvantageWorker:
    """Runs the algorithm's registered components over the samples of a batch."""

    def __init__(self, values: Values, algorithm: ResolvedAlgorithm) -> None:
        self._values, self._algorithm = values, algorithm

    async def estimate(self, batch: BatchMeta, kl_coefficient: float = 0.0) -> tuple[dict[str, float], Written]:
        """Write ``advantages`` and ``returns``, float32 per response token, and related columns.

        Args:
            batch: Samples of the policy, samples of an expert, and greedy rollouts that serve as baselines.
            kl_coefficient: Coefficient of the KL penalty in the reward.

        Returns:
            Metrics (statistics of rewards and advantages, ``reward/kl``, diagnostics of the off-policy correction),
            and what was written for all samples but baselines. Expert samples have advantage 0 and weight 1.
        """
        algorithm, target = self._algorithm, trained(batch)
        assert algorithm.advantages is not None
        rows = await self._read(own(target))
        totals = rows.token_rewards.sum(-1)
        metrics = {
            "reward/mean": float(totals.mean()),
            "reward/std": float(totals.std()) if len(totals) > 1 else 0.0,
            "reward/min": float(totals.min()),
            "reward/max": float(totals.max()),
        }
        token_rewards, inputs = self._shaped(rows, kl_coefficient, metrics), await self._inputs(batch, rows)
        with naming_rows([f"sample {key}" for key in rows.batch.keys]):
            estimated, returns = advantages(
                algorithm.advantages,
                token_rewards=token_rewards,
                response_mask=rows.mask,
                **inputs,
                **algorithm.advantages_options,
            )
        metrics["advantages/abs_mean"] = float(estimated.abs().mean())
        generated = rows.sizes.new_tensor([not is_expert(tags) for tags in target.tags]).bool()
        sizes = rows.sizes.new_tensor([int(tags["response_tokens"]) for tags in target.tags])
        sizes[generated] = rows.sizes

        def column(values: torch.Tensor, experts: float = 0.0) -> Column:
            whole = rows.token_rewards.new_full((len(sizes), max(int(sizes.max()), values.shape[1])), experts)
            whole[generated, : values.shape[1]] = values.float()
            return from_nested(from_padded(whole, sizes))

        columns = {"advantages": column(estimated), "returns": column(returns)}
        if algorithm.correction is not None:
            old, rollout = rows.padded("old_log_probs"), rows.padded("rollout_log_probs")
            weights, kept, diagnostics = algorithm.correction.weights(old, rollout, rows.mask)
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
        assert loss.preparation is not None
        there = {"old_log_probs", "rollout_log_probs", "advantages"} if algorithm.advantages else set()
        if algorithm.reference:
            there.add("ref_log_probs")
        names = {name: name for name in ("log_probs", *sorted(there.intersection(loss.preparation.inputs)))}
        if "old_log_probs" in names:
            names["old_log_probs"] = algorithm.old_log_probs
        columns = await self._values.read(batch, ("response_mask", *names.values()))
        nested, numbers = to_nested(columns["response_mask"]), _numbers(batch.groups)
        prepared = prepare(
            algorithm.loss,
            response_mask=to_padded(nested),
            group_ids=numbers,
            pair_ids=numbers,
            **{name: to_padded(to_nested(columns[column])) for name, column in names.items()},
            **{name: value for name, value in algorithm.loss_options.items() if name in loss.options},
        )
        sizes = lengths(nested)
        values = {
            name: from_nested(from_padded(value, sizes)) if value.dim() == 2 else dense_column(value)
            for name, value in prepared.items()
        }
        return await self._values.write(batch, values)

    async def _read(self, batch: BatchMeta) -> _Responses:
        algorithm = self._algorithm
        chosen = part("advantages", str(algorithm.advantages))
        taken = chosen.inputs
        names = {"response_mask", "reward", *({"values", "reward_dimensions"}.intersection(chosen.needs))}
        if algorithm.kl_in_reward is not None:
            names |= {algorithm.old_log_probs, "ref_log_probs"}
        if "old_log_probs" in taken:
            names.add(algorithm.old_log_probs)
        if algorithm.correction is not None:
            names |= {"old_log_probs", "rollout_log_probs"}
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
            prompts = to_nested(columns["prompt_ids"]).unbind()
            offered["anchor_ids"] = _numbers([tuple(prompt.tolist()) for prompt in prompts])
        if "reward_dimensions" in columns:
            offered["reward_dimensions"] = to_padded(to_nested(columns["reward_dimensions"]))
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
        self.batch, self.columns = batch, columns
        nested = to_nested(columns["response_mask"])
        self.mask = to_padded(nested)  #: bool ``[B, T]``
        self.sizes = lengths(nested)  #: int64 ``[B]``
        self.last = (self.sizes - 1).clamp(min=0).unsqueeze(-1)  #: int64 ``[B, 1]``: each response's last token
        self.token_rewards = self._rewards()  #: float32 ``[B, T]``

    def padded(self, name: str) -> torch.Tensor:
        """Return a column padded to ``[B, T]``."""
        return to_padded(to_nested(self.columns[name]), length=self.mask.shape[1])

    def _rewards(self) -> torch.Tensor:
        """Return token rewards; a sample's scalar reward is placed on the last token."""
        rewards = self.columns["reward"]
        dense = rewards.values.new_zeros(self.mask.shape)
        if rewards.offsets is None:
            return dense.scatter(1, self.last, rewards.values.unsqueeze(-1))
        per_token, single = self.padded("reward"), (rewards.offsets.diff() == 1).unsqueeze(-1)
        return dense.scatter(1, self.last, per_token[:, :1]).where(single, per_token)


def _numbers(names: Sequence[Any]) -> torch.Tensor:
    """Return int64 ``[B]`` with equal numbers for equal names."""
    import torch

    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])
