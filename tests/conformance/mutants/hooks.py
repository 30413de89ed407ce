"""A correct package of hooks with a loss and an estimator, and packages with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import torch

from jackfield.algorithms.registry import Positive
from mutants import harness
from mutants.harness import Reference

Tensor = torch.Tensor


@attrs.frozen
class Config:
    """No settings."""


def anchored(
    log_probs: Tensor, advantages: Tensor, ref_log_probs: Tensor, *, strength: Positive = 0.1
) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi + strength / 2 (log pi - log pi_ref)^2."""
    distance = log_probs - ref_log_probs
    weight = (0.1 * log_probs).exp().detach()  # a factor without gradient
    return -weight * advantages * log_probs + 0.5 * strength * distance.square(), {}


def centred(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """A = r - mean of the group."""
    scores = token_rewards.sum(-1)
    same = (group_ids[:, None] == group_ids).to(scores.dtype)
    return scores - same @ scores / same.sum(-1)


def package(loss: Callable[..., Any] = anchored, estimator: Callable[..., Any] = centred, scope: str = "group") -> type:
    """Return what stands for an installed package with these parts."""

    def register_parts(register: Callable[..., None]) -> None:
        register("loss", "anchored", loss, scope="token")
        register("advantages", "centred", estimator, scope=scope)

    hooks = type("hooks", (), {"register_parts": staticmethod(register_parts)})
    return type((loss if loss is not anchored else estimator).__name__, (), {"hooks": hooks, "abi_version": "1.0"})


REFERENCE = Reference(cls=package(), config_class=Config)


def no_docstring(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return -advantages * log_probs, {}


class _WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, values: Tensor) -> Tensor:
        return values * values

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def wrong_gradient(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """A log pi^2, with a gradient that was derived wrongly."""
    return advantages * _WrongGradient.apply(log_probs), {}


def counts_padding(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi times the width of the batch."""
    return -advantages * log_probs * log_probs.shape[1], {}


def compares_rows(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-(A - mean of the rows) log pi, on whatever rows it gets."""
    return -(advantages - advantages.mean(0)) * log_probs, {}


def counts_rows(log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A log pi, with more weight for later rows."""
    places = torch.arange(1, 1 + len(log_probs), dtype=log_probs.dtype)
    return -places[:, None] * advantages * log_probs, {}


def overflows(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """-A pi / pi_old, which overflows where the two are far from each other."""
    logs = log_probs - old_log_probs
    return -advantages * (logs + 100.0 * (logs - 10.0).clamp(min=0.0)).exp(), {}


def on_padding(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """A = r - mean of the group, on every position."""
    both = centred(token_rewards, response_mask, group_ids)[:, None].expand(response_mask.shape)
    return both, both


def by_position(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """A = r - the mean of four rows that are assumed to be a group."""
    scores = token_rewards.sum(-1).view(-1, 4)
    return (scores - scores.mean(-1, keepdim=True)).flatten()


def wider_than_it_says(token_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """A = r - mean of the batch."""
    scores = token_rewards.sum(-1)
    return scores - scores.mean()


def divides_by_nothing(token_rewards: Tensor, response_mask: Tensor, group_ids: Tensor) -> Tensor:
    """A = (r - mean) / the largest difference in the group."""
    away = centred(token_rewards, response_mask, group_ids)
    same = group_ids[:, None] == group_ids
    return away / (same * away.abs()).amax(-1)


def _mutant(what: str, numbers: str, **parts: Any) -> harness.Mutant:
    return harness.mutant("hooks", package(**parts), what, numbers)


MUTANTS = harness.named(
    _mutant("a loss does not say what it computes", "010", loss=no_docstring),
    _mutant("a backward pass is wrong", "011", loss=wrong_gradient),
    _mutant("a loss grows with the width of the batch", "012", loss=counts_padding),
    _mutant("a loss compares the rows of a micro-batch", "013", loss=compares_rows),
    _mutant("a loss depends on the place of a row", "013 014", loss=counts_rows),
    _mutant("a ratio overflows", "015", loss=overflows),
    _mutant("advantages are on padding, too", "021", estimator=on_padding),
    _mutant("rows of a group are taken by their place", "022 023", estimator=by_position),
    _mutant("an estimator of groups compares the batch", "023", estimator=wider_than_it_says),
    _mutant("equal rewards are divided by 0", "024", estimator=divides_by_nothing),
)
