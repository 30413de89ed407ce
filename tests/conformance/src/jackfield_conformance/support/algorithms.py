"""Helpers for the suite of packages of hooks: batches for any loss or estimator, and calls of them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jackfield.algorithms import advantages, policy_loss, prepare, registry
from jackfield.algorithms.registry import KINDS, Part
from jackfield.errors import JackfieldError
from jackfield_conformance.registry import NotApplicable, Subject

if TYPE_CHECKING:
    import torch

PAGE = "docs/plugins/hooks.md#"
ROWS, LENGTH = 8, 5
#: Inputs of losses and estimators with a value per token or row, by which rows are taken and padded.
_TOKENS: tuple[str, ...] = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "advantages")
_TOKENS += ("token_rewards", "values")
_TOKENS += ("sum_pi_squared", "response_mask")

Batch = dict[str, Any]


def registered_by(subject: Subject) -> list[Part]:
    """Return what the package registers, samplers left out, without a change of the registry."""
    found: list[Part] = []

    def note(kind: str, name: str, function: Any, **fields: Any) -> None:
        if kind in KINDS:
            found.append(Part(kind=kind, name=name, function=function, **{"scope": "batch", **fields}))

    subject.cls.hooks.register_parts(note)
    return found


@contextlib.contextmanager
def parts(subject: Subject, kind: str | None = None) -> Iterator[list[Part]]:
    """Put the package's parts into the registry for a check, and yield all, or those of a kind that it has."""
    made, kept = registered_by(subject), dict(registry._PARTS)
    chosen = [one for one in made if kind in (None, one.kind)]
    if not chosen and kind is not None:
        raise NotApplicable(f"the package registers no part of kind {kind}")
    registry._PARTS.update({(one.kind, one.name): one for one in made})
    try:
        yield chosen
    finally:
        registry._PARTS.clear()
        registry._PARTS.update(kept)


def options_of(subject: Subject, one: Part) -> dict[str, Any]:
    """Return the options of the fixture for a part (``options: {"loss NAME": {...}}``), and a seed if it draws."""
    given: Mapping[str, Any] = subject.fixture.get("options", {}).get(f"{one.kind} {one.name}", {})
    return {**({"seed": 5} if "seed" in one.options else {}), **given}


def batch(seed: int = 0) -> Batch:
    """Return all inputs in float64: two groups of four rows, gaps in masks, a model token in each row."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.rand(ROWS, LENGTH, generator=generator) < 0.7
    mask[:, 0] = True
    old = -normal(ROWS, LENGTH).abs() - 0.05
    scores = normal(ROWS)
    rewards = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    rewards[:, 0] = scores
    order = torch.randperm(ROWS, generator=generator)
    return {
        "log_probs": (old + 0.4 * normal(ROWS, LENGTH)).clamp(max=-0.01),
        "old_log_probs": old,
        "ref_log_probs": old + 0.2 * normal(ROWS, LENGTH),
        "rollout_log_probs": old + 0.2 * normal(ROWS, LENGTH),
        "advantages": normal(ROWS, LENGTH),
        "values": normal(ROWS, LENGTH),
        "sum_pi_squared": torch.rand(ROWS, LENGTH, generator=generator, dtype=torch.float64),
        "token_rewards": rewards,
        "response_mask": mask,
        "rewards": scores,
        "baseline_rewards": normal(ROWS),
        "reward_dimensions": normal(ROWS, 2),
        "expert_mask": torch.arange(ROWS) % 3 == 1,
        "group_ids": (torch.arange(ROWS) // 4)[order],
        "pair_ids": (torch.arange(ROWS) // 2)[order],
        "rollout_ids": torch.arange(ROWS),
        "step_ids": torch.zeros(ROWS, dtype=torch.int64),
        "anchor_ids": torch.arange(ROWS),
    }


def rows_of(data: Batch, rows: Sequence[int]) -> Batch:
    """Return rows of a batch, in this order."""
    return {name: value[list(rows)] for name, value in data.items()}


def padded(data: Batch) -> Batch:
    """Return a batch that is two positions wider; the new ones are not of the mask, and hold NaN."""
    import torch

    wider = dict(data)
    for name in _TOKENS:
        if name in data:
            fill = False if name == "response_mask" else 0.0 if name == "token_rewards" else math.nan
            more = torch.full((len(data[name]), 2), fill, dtype=data[name].dtype)
            wider[name] = torch.cat([data[name], more], 1)
    return wider


def taken(one: Part, data: Batch, *always: str) -> Batch:
    """Return the inputs that a part and its preparation take; fail if it needs one that no run has."""
    wanted = {*one.inputs, *(one.preparation.inputs if one.preparation else ()), *always}
    known = {*data, *registry.COUNTS, *one.whole_batch, *one.options}
    unknown = sorted(set(one.needs) - known)
    assert not unknown, f"{one.kind} {one.name} needs {', '.join(unknown)}, which no run has"
    return {name: value for name, value in data.items() if name in wanted}


def loss_of(
    one: Part, data: Batch, options: Mapping[str, Any], split: Sequence[Sequence[int]] | None = None
) -> tuple[float, torch.Tensor]:
    """Return the loss and its gradient by ``log_probs``, ``[B, T]``, summed over the micro-batches ``split``."""
    mask, expert = data["response_mask"], data["expert_mask"]
    counts: dict[str, Any] = {"global_tokens": int(mask.sum()), "global_sequences": len(mask)}
    usual = {"usual": ~expert, "expert": expert}
    kinds = {f"global_{name}_tokens": int(mask[rows].sum()) for name, rows in usual.items()}
    kinds |= {f"global_{name}_sequences": int(rows.sum()) for name, rows in usual.items()}
    counts |= {name: value for name, value in kinds.items() if name in one.inputs or name in one.whole_batch}
    given = taken(one, data, "log_probs", "response_mask")
    if one.preparation is not None:
        given |= prepare(one.name, **given, **options)
    total, gradients = 0.0, given["log_probs"].new_zeros(mask.shape)
    for rows in split or [range(len(mask))]:
        chosen = rows_of(given, rows)
        log_probs = chosen.pop("log_probs").clone().requires_grad_()
        loss, _ = policy_loss(one.name, log_probs=log_probs, whole_batch=False, **chosen, **counts, **options)
        loss.backward()
        assert log_probs.grad is not None
        total, gradients[list(rows)] = total + loss.item(), log_probs.grad
    return total, gradients


def refuses(call: Callable[[], Any]) -> Any:
    """Return the result of a call; None if the part refuses such a batch with an error of Jackfield."""
    try:
        return call()
    except JackfieldError:
        return None


def estimate_of(one: Part, data: Batch, options: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns, ``[B, T]``."""
    given = taken(one, data, "token_rewards", "response_mask")
    return advantages(one.name, **given, **options)


@contextlib.contextmanager
def constants_kept() -> Iterator[Callable[[], None]]:
    """Keep what ``detach`` returned first: a factor without gradient is a constant of the loss, not a function.

    The function that is yielded begins the next call of the loss, in which each ``detach`` returns what it did first.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    kept: list[torch.Tensor] = []

    class Mode(TorchFunctionMode):
        place: int | None = None

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is not torch.Tensor.detach:
                return result
            if self.place is None:
                kept.append(result.clone())
                return result
            self.place += 1
            return kept[self.place - 1].clone()

    mode = Mode()

    def again() -> None:
        mode.place = 0

    with mode:
        yield again
