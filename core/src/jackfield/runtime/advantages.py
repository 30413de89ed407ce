"""The advantage worker: rewards from the queue, advantages into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.algorithms import advantages
from jackfield.clock import Clock
from jackfield.data.jagged import from_padded, lengths, to_padded
from jackfield.queue import BatchMeta, Rows, TransferQueue, Written, from_nested, to_nested

__all__ = ["AdvantageEstimation", "AdvantageWorker"]


class AdvantageEstimation:
    """The controller's side: has a worker estimate, and tells the queue what it has written."""

    def __init__(self, worker: AdvantageWorker, queue: TransferQueue, clock: Clock, *, seconds: float) -> None:
        self._worker = worker
        self._queue = queue
        self._clock = clock
        self._seconds = seconds

    async def estimate(self, batch: BatchMeta) -> dict[str, float]:
        """Write ``advantages`` and ``returns``; return the rewards' statistics."""
        what = f"the advantages of {len(batch)} samples from {batch.keys[0]} to {batch.keys[-1]}"
        metrics, written = await self._clock.wait_for(self._worker.estimate(batch), self._seconds, what)
        self._queue.announce(batch, written)
        return metrics


class AdvantageWorker:
    """Runs a registered estimator on the rows of a batch."""

    def __init__(self, rows: Rows, name: str, options: Mapping[str, Any]) -> None:
        self._rows = rows
        self._name = name
        self._options = dict(options)

    async def estimate(self, batch: BatchMeta) -> tuple[dict[str, float], Written]:
        """Write ``advantages`` and ``returns``, float32 per response token; return the rewards' statistics."""
        import torch

        columns = await self._rows.get(batch.partition, batch.keys, ("response_mask", "reward"))
        nested_mask = to_nested(columns["response_mask"])
        mask = to_padded(nested_mask)
        sizes = lengths(nested_mask)
        token_rewards = torch.zeros(mask.shape)
        rewards = columns["reward"]
        if rewards.offsets is None:
            token_rewards[torch.arange(len(mask)), sizes - 1] = rewards.values
        else:
            per_token = to_padded(to_nested(rewards), length=mask.shape[1])
            single = rewards.offsets.diff() == 1
            token_rewards[~single] = per_token[~single]
            token_rewards[torch.arange(len(mask))[single], sizes[single] - 1] = per_token[single, 0]
        numbers = {group: number for number, group in enumerate(dict.fromkeys(batch.group_ids))}
        group_ids = torch.tensor([numbers[group] for group in batch.group_ids])
        adv, returns = advantages(
            self._name, token_rewards=token_rewards, response_mask=mask, group_ids=group_ids, **self._options
        )
        written = await self._rows.put(
            batch.partition,
            batch.keys,
            {
                "advantages": from_nested(from_padded(adv, sizes)),
                "returns": from_nested(from_padded(returns, sizes)),
            },
        )
        totals = token_rewards.sum(-1)
        metrics = {
            "reward/mean": float(totals.mean()),
            "reward/std": float(totals.std()) if len(totals) > 1 else 0.0,
            "reward/min": float(totals.min()),
            "reward/max": float(totals.max()),
            "advantages/abs_mean": float(adv.abs().mean()),
        }
        return metrics, written
