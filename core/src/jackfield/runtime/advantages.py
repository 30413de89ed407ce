"""The advantage worker: what an algorithm has to know of a whole batch, from the queue's columns into further ones.

It takes metadata and gives plain numbers back, so that it may live in another process than the trainer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jackfield.algorithms import advantages, kl_in_reward, part, prepare
from jackfield.algorithms.resolved import ResolvedAlgorithm
from jackfield.clock import Clock
from jackfield.queue import (
    BatchMeta,
    TransferQueue,
    Values,
    Written,
    column_from_rows,
    dense_column,
    from_nested,
    rows_of,
    to_nested,
)
from jackfield.runtime.samples import is_baseline, is_expert, naming_samples, trained
from jackfield.sdk.jagged import from_padded, lengths, to_padded

if TYPE_CHECKING:
    import torch

    from jackfield.abc.transfer_queue import Column


class AdvantageEstimation:
    """The controller's side: has a worker compute, and tells the queue what it has written."""

    def __init__(self, worker: AdvantageWorker, queue: TransferQueue, clock: Clock, *, seconds: float) -> None:
        self._worker = worker
        self._queue = queue
        self._clock = clock
        self._seconds = seconds

    async def estimate(self, batch: BatchMeta, kl_coefficient: float = 0.0) -> dict[str, float]:
        """See :meth:`AdvantageWorker.estimate`."""
        what = f"the advantages of {len(batch)} samples from {batch.keys[0]} to {batch.keys[-1]}"
        work = self._worker.estimate(batch, kl_coefficient)
        metrics, written = await self._clock.wait_for(work, self._seconds, what)
        await self._queue.add_columns(trained(batch), written)
        return metrics

    async def prepare(self, batch: BatchMeta) -> None:
        """See :meth:`AdvantageWorker.prepare`."""
        what = f"what the loss has to know of {len(batch)} samples from {batch.keys[0]} to {batch.keys[-1]}"
        await self._queue.add_columns(
            batch, await self._clock.wait_for(self._worker.prepare(batch), self._seconds, what)
        )


class AdvantageWorker:
    """Runs registered parts over the rows of a batch."""

    def __init__(self, values: Values, algorithm: ResolvedAlgorithm) -> None:
        self._values = values
        self._algorithm = algorithm

    async def estimate(self, batch: BatchMeta, kl_coefficient: float = 0.0) -> tuple[dict[str, float], Written]:
        """Write ``advantages`` and ``returns``, float32 per response token, and what else the algorithm reads.

        Args:
            batch: rows that the policy generated, an expert's among them, and greedy rollouts as baselines.
            kl_coefficient: of the KL penalty in the reward.

        Returns:
            statistics of rewards and advantages, ``reward/kl``, the correction's diagnostics; and what was written to
            all rows but baselines. An expert's rows have advantages of 0 and nothing to correct.
        """
        assert self._algorithm.advantages is not None
        rows = await self._read(batch.select(_where(batch, lambda tags: not is_expert(tags) and not is_baseline(tags))))
        baselines = await self._baselines(batch, rows.batch)
        metrics = _reward_statistics(rows.token_rewards)
        token_rewards = self._shaped(rows, kl_coefficient, metrics)
        with naming_samples(rows.batch):
            estimated, returns = advantages(
                self._algorithm.advantages,
                token_rewards=token_rewards,
                response_mask=rows.mask,
                **self._inputs(rows, baselines),
                **self._algorithm.advantages_options,
            )
        metrics["advantages/abs_mean"] = float(estimated.abs().mean())
        columns = {"advantages": rows.jagged(estimated), "returns": rows.jagged(returns)}
        if self._algorithm.correction is not None:
            columns["rollout_weights"] = rows.jagged(self._weights(rows, metrics))
        if "rewards" in self._algorithm.loss_columns:
            columns["rewards"] = dense_column(rows.token_rewards.sum(-1))
        target = trained(batch)
        if self._algorithm.mixes:
            columns = _beside_experts(target, columns)
        return metrics, await self._values.write(target, columns)

    async def prepare(self, batch: BatchMeta) -> Written:
        """Write what the loss has to know of the whole batch (see :func:`jackfield.algorithms.prepare`).

        ``batch`` is that of one optimizer step, and has the policy's log-probs as it begins in ``log_probs``.
        """
        algorithm, loss = self._algorithm, part("loss", self._algorithm.loss)
        taken = loss.prepare_inputs.keys() - {"response_mask", "group_ids", "pair_ids"}
        there = {"old_log_probs", "rollout_log_probs", "advantages"} if self._algorithm.advantages else set()
        if self._algorithm.reference:
            there.add("ref_log_probs")
        names = {name: self._column(name) for name in ("log_probs", *sorted(taken & there))}
        columns = await self._get(batch, ("response_mask", *names.values()))
        nested = to_nested(columns["response_mask"])
        numbers = _numbers(batch.groups)
        prepared = prepare(
            self._algorithm.loss,
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

    async def _get(self, batch: BatchMeta, names: Sequence[str]) -> dict[str, Column]:
        return await self._values.read(batch, names)

    def _column(self, name: str) -> str:
        return self._algorithm.old_log_probs if name == "old_log_probs" else name

    async def _read(self, batch: BatchMeta) -> _Responses:
        assert self._algorithm.advantages is not None
        chosen = part("advantages", self._algorithm.advantages)
        names = ["response_mask", "reward"]
        taken = {*chosen.needs, *chosen.accepts}
        names += [name for name in ("values", "reward_dimensions") if name in chosen.needs]
        if "old_log_probs" in taken or self._algorithm.kl_in_reward is not None:
            names.append(self._algorithm.old_log_probs)
        if self._algorithm.kl_in_reward is not None:
            names.append("ref_log_probs")
        if self._algorithm.correction is not None:
            names += ["old_log_probs", "rollout_log_probs"]
        if "anchor_ids" in taken:
            names.append("prompt_ids")
        return _Responses(batch, await self._get(batch, tuple(dict.fromkeys(names))))

    async def _baselines(self, batch: BatchMeta, rows: BatchMeta) -> torch.Tensor | None:
        """``[B]``: for each row the reward of its group's greedy rollout; None without such runs."""
        import torch

        found = batch.select(_where(batch, is_baseline))
        if not found:
            return None
        greedy = _Responses(found, await self._get(found, ("response_mask", "reward")))
        totals = dict.fromkeys(found.groups, 0.0)
        for group, total in zip(found.groups, greedy.token_rewards.sum(-1).tolist(), strict=True):
            totals[group] += total
        return torch.tensor([totals[group] for group in rows.groups])

    def _inputs(self, rows: _Responses, baselines: torch.Tensor | None) -> dict[str, Any]:
        """Whatever an estimator may ask for beside rewards; each takes what it uses."""
        import torch

        tags = rows.batch.tags
        offered: dict[str, Any] = {
            "group_ids": _numbers(rows.batch.groups),
            "rollout_ids": torch.tensor([int(one.get("rollout", 0)) for one in tags]),
            "step_ids": torch.tensor([int(one.get("step_id", 0)) for one in tags]),
            "baseline_rewards": baselines,
        }
        if "values" in rows.columns:
            offered["values"] = rows.padded("values")
        if "prompt_ids" in rows.columns:  # a step's state is what the model was shown
            prompts = to_nested(rows.columns["prompt_ids"]).unbind()
            offered["anchor_ids"] = _numbers([tuple(prompt.tolist()) for prompt in prompts])
        if "reward_dimensions" in rows.columns:
            offered["reward_dimensions"] = to_padded(to_nested(rows.columns["reward_dimensions"]))
        if self._algorithm.old_log_probs in rows.columns:
            offered["old_log_probs"] = rows.padded(self._algorithm.old_log_probs)
        return offered

    def _shaped(self, rows: _Responses, kl_coefficient: float, metrics: dict[str, float]) -> torch.Tensor:
        """Rewards after shaping: changes of a whole response's reward stand on its last token."""
        import torch

        rewards = rows.token_rewards
        if self._algorithm.shaping.active:
            totals = rewards.sum(-1)
            change = self._algorithm.shaping.shape(totals, rows.sizes) - totals
            rewards = rewards.clone()
            rewards[torch.arange(len(rewards)), rows.sizes - 1] += change
        if self._algorithm.kl_in_reward is not None:
            old, reference = rows.padded(self._algorithm.old_log_probs), rows.padded("ref_log_probs")
            rewards, mean = kl_in_reward(
                rewards, old, reference, rows.mask, coefficient=kl_coefficient, estimator=self._algorithm.kl_in_reward
            )
            metrics |= {"reward/kl": float(mean), "reward/kl_coefficient": kl_coefficient}
        if rewards is not rows.token_rewards:
            metrics["reward/shaped_mean"] = float(rewards.sum(-1).mean())
        return rewards

    def _weights(self, rows: _Responses, metrics: dict[str, float]) -> torch.Tensor:
        """Weights of the policy that generated, 0 for what is rejected."""
        assert self._algorithm.correction is not None
        weights, kept, diagnostics = self._algorithm.correction.weights(
            rows.padded("old_log_probs"), rows.padded("rollout_log_probs"), rows.mask
        )
        metrics |= {f"correction/{name}": float(value) for name, value in diagnostics.items()}
        return weights.masked_fill(kept == 0, 0.0)


class _Responses:
    """Columns of rows, padded where they are asked for."""

    def __init__(self, batch: BatchMeta, columns: Mapping[str, Column]) -> None:
        self.batch = batch
        self.columns = columns
        nested = to_nested(columns["response_mask"])
        self.mask = to_padded(nested)  #: bool ``[B, T]``
        self.sizes = lengths(nested)  #: int64 ``[B]``
        self.token_rewards = self._rewards()  #: float32 ``[B, T]``

    def padded(self, name: str) -> torch.Tensor:
        """``[B, T]``."""
        return to_padded(to_nested(self.columns[name]), length=self.mask.shape[1])

    def jagged(self, values: torch.Tensor) -> Column:
        """``[B, T]`` as a column."""
        return from_nested(from_padded(values.float(), self.sizes))

    def _rewards(self) -> torch.Tensor:
        """One number a row stands on the response's last token."""
        import torch

        rewards, rows = self.columns["reward"], torch.arange(len(self.mask))
        dense = torch.zeros(self.mask.shape)
        if rewards.offsets is None:
            dense[rows, self.sizes - 1] = rewards.values
            return dense
        per_token = self.padded("reward")
        single = rewards.offsets.diff() == 1
        dense[~single] = per_token[~single]
        dense[rows[single], self.sizes[single] - 1] = per_token[single, 0]
        return dense


def _where(batch: BatchMeta, wanted: Any) -> list[int]:
    return [index for index, tags in enumerate(batch.tags) if wanted(tags)]


def _numbers(names: Sequence[Any]) -> torch.Tensor:
    """int64 ``[B]``: equal numbers for equal names."""
    import torch

    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def _beside_experts(batch: BatchMeta, columns: Mapping[str, Column]) -> dict[str, Column]:
    """Columns of the policy's rows with an expert's in their places: weights of 1, else 0; and ``expert_mask``."""
    import torch

    experts = [is_expert(tags) for tags in batch.tags]
    sizes = [int(tags["response_tokens"]) for tags in batch.tags]
    result = {"expert_mask": dense_column(torch.tensor(experts))}
    for name, column in columns.items():
        value, own = float(name == "rollout_weights"), iter(rows_of(column))
        if column.offsets is None:
            dense = [torch.tensor(value) if expert else next(own) for expert in experts]
            result[name] = dense_column(torch.stack(dense))
        else:
            rows = [
                torch.full((size,), value) if expert else next(own) for size, expert in zip(sizes, experts, strict=True)
            ]
            result[name] = column_from_rows(rows)
    return result


def _reward_statistics(token_rewards: torch.Tensor) -> dict[str, float]:
    totals = token_rewards.sum(-1)
    return {
        "reward/mean": float(totals.mean()),
        "reward/std": float(totals.std()) if len(totals) > 1 else 0.0,
        "reward/min": float(totals.min()),
        "reward/max": float(totals.max()),
    }
