"""The advantage worker: rewards from the queue, advantages into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jackfield.algorithms import advantages
from jackfield.data.jagged import from_padded, lengths, to_padded
from jackfield.queue import BatchMeta, TransferQueue, from_nested, to_nested

__all__ = ["AdvantageWorker"]


class AdvantageWorker:
    """Runs a registered estimator on the rows of a batch."""

    def __init__(self, queue: TransferQueue, name: str, options: Mapping[str, Any]) -> None:
        self._queue = queue
        self._name = name
        self._options = dict(options)

    async def estimate(self, batch: BatchMeta) -> dict[str, float]:
        """Write ``advantages`` and ``returns``, float32 per response token; return the rewards' statistics."""
        import torch

        columns = await self._queue.get(batch, ("response_mask", "reward"))
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
        await self._queue.put(
            batch,
            {
                "advantages": from_nested(from_padded(adv, sizes)),
                "returns": from_nested(from_padded(returns, sizes)),
            },
        )
        totals = token_rewards.sum(-1)
        return {
            "reward/mean": float(totals.mean()),
            "reward/std": float(totals.std()) if len(totals) > 1 else 0.0,
            "reward/min": float(totals.min()),
            "reward/max": float(totals.max()),
            "advantages/abs_mean": float(adv.abs().mean()),
        }
