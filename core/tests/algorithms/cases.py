"""Batches for every registered loss and estimator, and calls of a loss on a whole batch or on its parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from jackfield.algorithms import advantages, names, policy_loss, prepare

Rows = list[list[float]]

AGGREGATIONS = names("aggregation")
LOSSES = names("loss")
#: Options under which each part of a loss is at work on such small batches.
OPTIONS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lower": -0.5, "clip_cov_upper": 5.0},
    "kl_cov": {"kl_cov_ratio": 0.3},
    "dpo": {"beta": 0.4, "label_smoothing": 0.1},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1},
    "dppo_tv": {"delta_low": 0.05, "delta_high": 0.05},
    "rec": {"regularizer": "k2", "regularizer_coefficient": 0.1},
    "mix": {"mu": 0.3},
    "mix_chord": {"mu": 0.3},
}


def batch(rows: int = 8, length: int = 5, seed: int = 0, scale: float = 0.4) -> dict[str, torch.Tensor]:
    """Return all inputs of losses in float64, with scattered pairs and groups, gaps in masks and a token per row."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, 0] = True
    old = -normal(rows, length).abs() - 0.05
    order = torch.randperm(rows, generator=generator)
    return {
        "log_probs": (old + scale * normal(rows, length)).clamp(max=-0.01),
        "old_log_probs": old,
        "ref_log_probs": old + 0.2 * normal(rows, length),
        "rollout_log_probs": old + 0.2 * normal(rows, length),
        "advantages": normal(rows, length),
        "response_mask": mask,
        "expert_mask": torch.arange(rows) % 3 == 1,
        "pair_ids": (torch.arange(rows) // 2)[order],
        "group_ids": (torch.arange(rows) // 4)[order],
        "rewards": normal(rows),
    }


def counts(data: dict[str, torch.Tensor]) -> dict[str, int]:
    """The global counts of a whole batch."""
    mask, expert = data["response_mask"] != 0, data["expert_mask"]
    return {
        "global_tokens": int(mask.sum()),
        "global_sequences": len(mask),
        "global_usual_tokens": int(mask[~expert].sum()),
        "global_expert_tokens": int(mask[expert].sum()),
        "global_usual_sequences": int((~expert).sum()),
        "global_expert_sequences": int(expert.sum()),
    }


def loss_of(
    name: str,
    data: dict[str, torch.Tensor],
    parts: Sequence[torch.Tensor] | None = None,
    aggregation: str = "token-mean",
    **options: Any,
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return loss, gradient and metrics, summed over ``parts`` (row indices) or of the whole batch in one call."""
    options = {**OPTIONS.get(name, {}), **options}
    log_probs = data["log_probs"].clone().requires_grad_()
    others = {key: value for key, value in data.items() if key != "log_probs"}
    total, metrics = 0.0, dict[str, float]()
    if parts is None:
        loss, values = policy_loss(
            name, log_probs=log_probs, aggregation=aggregation, length_norm=7.0, **others, **counts(data), **options
        )
        loss.backward()
        total, metrics = float(loss.detach()), {key: float(value) for key, value in values.items()}
    else:
        columns = prepare(name, log_probs=log_probs, **others, **options)
        assert not any(column.requires_grad for column in columns.values())
        hidden = {"pair_ids", "group_ids"} if columns else set()
        for rows in parts:
            share = {key: value[rows] for key, value in {**others, **columns}.items() if key not in hidden}
            loss, values = policy_loss(
                name,
                log_probs=log_probs[rows],
                aggregation=aggregation,
                length_norm=7.0,
                **share,
                **counts(data),
                **options,
            )
            loss.backward()
            total += float(loss.detach())
            for key, value in values.items():
                metrics[key] = metrics.get(key, 0.0) + float(value)
    assert log_probs.grad is not None
    return total, log_probs.grad, metrics


class Case:
    """A batch as tensors and as lists. Masks have gaps, rewards stand anywhere, rows of one run lie apart."""

    def __init__(self, seed: int, rows: int = 9, length: int = 6) -> None:
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> torch.Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.mask = uniform(rows, length) < 0.7
        self.mask[0] = False  # an empty response
        rewards = torch.where(uniform(rows, length) < 0.3, (uniform(rows, length) * 3).round() / 2, 0.0)
        rewards[:, 1] += (uniform(rows) * 2).round()
        self.inputs: dict[str, torch.Tensor] = {
            "group_ids": (uniform(rows) * 4).long() * 7 - 3,
            "rollout_ids": (uniform(rows) * 3).long() + 100,
            "step_ids": torch.randperm(rows, generator=generator),
            "anchor_ids": (uniform(rows) * 3).long(),
            "values": uniform(rows, length),
            "old_log_probs": -uniform(rows, length) - 0.1,
            "reward_dimensions": (uniform(rows, 2) * 2).round(),
            "baseline_rewards": uniform(rows),
        }
        pi = self.inputs["old_log_probs"].exp()
        self.inputs["sum_pi_squared"] = pi.square() + uniform(rows, length) * (1 - pi).square()
        self.rewards = rewards
        self.rows, self.length = rows, length

    def found(self, name: str, **options: Any) -> torch.Tensor:
        return advantages(name, token_rewards=self.rewards, response_mask=self.mask, **self.inputs, **options)[0]

    @property
    def scores(self) -> list[float]:
        return [math.fsum(row) for row in self.rewards.tolist()]

    def groups(self, ids: list[Any] | None = None) -> list[list[int]]:
        """Return for each row the rows of its group."""
        ids = self.inputs["group_ids"].tolist() if ids is None else ids
        return [[other for other, number in enumerate(ids) if number == own] for own in ids]

    def on_tokens(self, rows: list[float]) -> Rows:
        return [[value if keep else 0.0 for keep in kept] for value, kept in zip(rows, self.mask.tolist(), strict=True)]
