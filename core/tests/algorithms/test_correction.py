"""Importance weights, rejection and their diagnostics against plain Python; the correction of a loss."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.algorithms import part, policy_loss
from jackfield.algorithms.shaping import Correction
from jackfield_testing import refused

from .cases import batch, counts, loss_of

LEVELS = ("token", "sequence", "geometric")
BOUNDS = ("truncate", "icepop", "none")
REJECTS = ("none", "token", "sequence-sum", "sequence-mean", "sequence-max")


def importance_weights(
    log_probs: torch.Tensor, rollout_log_probs: torch.Tensor, response_mask: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    return Correction(**options).weights(log_probs, rollout_log_probs, response_mask)


def reference(
    data: dict[str, torch.Tensor], level: str, bound: str, reject: str, normalize: bool = False
) -> tuple[list[list[float]], list[list[bool]]]:
    """Weights and what is kept, token by token; bounds 0.6 and 1.5 throughout."""
    low, high = 0.6, 1.5
    weights, kept = [], []
    for lp, ro, mask in zip(
        *(data[key].tolist() for key in ("log_probs", "rollout_log_probs", "response_mask")), strict=True
    ):
        logs = [a - b for a, b, mark in zip(lp, ro, mask, strict=True) if mark]
        total = math.fsum(logs)
        average = total / max(len(logs), 1)
        row_weights, row_kept = [], []
        for a, b, mark in zip(lp, ro, mask, strict=True):
            ratio = math.exp({"token": a - b, "sequence": total, "geometric": average}[level])
            if bound == "truncate":
                ratio = min(ratio, high)
            if bound == "icepop" and not low <= ratio <= high:
                ratio = 0.0
            statistics = {
                "none": [1.0],
                "token": [math.exp(a - b)],
                "sequence-sum": [math.exp(total)],
                "sequence-mean": [math.exp(average)],
                "sequence-max": [math.exp(value) for value in logs],
            }[reject]
            row_weights.append(ratio if mark else 0.0)
            row_kept.append(mark and all(low <= value <= high for value in statistics))
        weights.append(row_weights)
        kept.append(row_kept)
    if normalize:
        if level == "token":
            used = [
                w for row, marks in zip(weights, kept, strict=True) for w, mark in zip(row, marks, strict=True) if mark
            ]
        else:
            used = [
                next(w for w, mark in zip(row, marks, strict=True) if mark)
                for row, marks in zip(weights, kept, strict=True)
                if any(marks)
            ]
        mean = math.fsum(used) / len(used) if used else 0.0
        weights = [[w / (mean or 1.0) for w in row] for row in weights]
    return weights, kept


@pytest.mark.parametrize(("level", "bound", "reject"), list(itertools.product(LEVELS, BOUNDS, REJECTS)))
@settings(deadline=None, max_examples=4)
@given(seed=st.integers(0, 10_000), normalize=st.booleans())
def test_equals_the_reference(level: str, bound: str, reject: str, seed: int, normalize: bool) -> None:
    data = batch(seed=seed)
    data["response_mask"][0] = False  # an empty response
    weights, mask, _ = importance_weights(
        data["log_probs"],
        data["rollout_log_probs"],
        data["response_mask"],
        level=level,
        bound=bound,
        reject=reject,
        upper=1.5,
        lower=0.6,
        reject_low=0.6,
        reject_high=1.5,
        batch_normalize=normalize,
    )
    expected, kept = reference(data, level, bound, reject, normalize)
    torch.testing.assert_close(torch.tensor(expected, dtype=torch.float64), weights)
    assert kept == mask.tolist()


def test_golden_values_and_diagnostics() -> None:
    """Ratios 1/2, 1, 4 and a masked one."""
    ratios = torch.tensor([[0.5, 1.0, 4.0, math.nan]], dtype=torch.float64)
    weights, mask, found = importance_weights(
        ratios.log(),
        torch.zeros(1, 4, dtype=torch.float64),
        torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        reject="token",
        lower=0.6,
    )
    assert [0.5, 1.0, 2.0, 0.0] == pytest.approx(weights[0].tolist())
    assert [1.0, 1.0, 0.0, 0.0] == mask[0].tolist()
    expected = {
        "mean": 3.5 / 3,
        "std": math.sqrt(((0.5 - 3.5 / 3) ** 2 + (1 - 3.5 / 3) ** 2 + (2 - 3.5 / 3) ** 2) / 2),
        "min": 0.5,
        "max": 2.0,
        "effective_sample_size": 3.5**2 / (3 * 5.25),
        "fraction_high": 1 / 3,
        "fraction_low": 1 / 3,
        "fraction_rejected": 1 / 3,
        "kl": -math.log(2.0) / 3,
        "kl_k3": (-0.5 + math.log(2) + 3 - math.log(4)) / 3,
    }
    assert expected == pytest.approx({key: float(value) for key, value in found.items()})


def test_equal_policies_weigh_everything_one() -> None:
    data = batch()
    for level in LEVELS:
        weights, mask, found = importance_weights(
            data["log_probs"], data["log_probs"], data["response_mask"], level=level, reject="sequence-max"
        )
        assert torch.equal(weights, data["response_mask"].double())
        assert torch.equal(mask, data["response_mask"])
        assert 1.0 == pytest.approx(float(found["effective_sample_size"]))
        assert 0.0 == float(found["kl"])


def test_edges() -> None:
    """No token, no row, weights that are all 0, far apart policies: finite everywhere."""
    for shape in ((2, 3), (0, 3), (2, 0)):
        weights, _, found = importance_weights(
            torch.zeros(shape), torch.zeros(shape), torch.zeros(shape), batch_normalize=True
        )
        assert shape == tuple(weights.shape)
        assert all(bool(value.isfinite()) for value in found.values())
    far = torch.full((1, 400), -5.0)
    for level in LEVELS:
        weights, _, found = importance_weights(
            far, 9 * far, torch.ones(1, 400), level=level, bound="icepop", batch_normalize=True
        )
        assert 0.0 == float(weights.abs().max())
        assert all(bool(value.isfinite()) for value in found.values())


def test_weights_carry_no_gradient() -> None:
    data = batch()
    weights, _, _ = importance_weights(
        data["log_probs"].requires_grad_(), data["rollout_log_probs"], data["response_mask"]
    )
    assert not weights.requires_grad


@pytest.mark.parametrize("which", ["log_probs", "rollout_log_probs"])
def test_bad_numbers_are_named(which: str) -> None:
    data = batch()
    data[which][4, 0] = -math.inf
    with refused("algorithm.not-finite", "row 4, response token 0"):
        importance_weights(data["log_probs"], data["rollout_log_probs"], data["response_mask"])


@pytest.mark.parametrize(
    "options",
    [{"level": "row"}, {"bound": "clip"}, {"reject": "all"}, {"upper": 0.5, "lower": 0.5}, {"reject_low": -1.0}],
)
def test_wrong_settings_are_refused(options: dict[str, Any]) -> None:
    with refused("algorithm.input"):
        part("correction", "importance_weights").split(options)


def test_a_corrected_loss_is_the_sum_of_weighted_tokens_by_the_full_counts() -> None:
    data = batch(seed=3)
    correction = {"upper": 1.2, "reject": "sequence-max"}
    weights, mask, _ = importance_weights(
        data["old_log_probs"], data["rollout_log_probs"], data["response_mask"], **correction
    )
    tokens = int(data["response_mask"].sum())
    expected = float((-data["advantages"] * data["log_probs"] * weights * mask).sum() / tokens)
    data["rollout_weights"] = weights * mask
    whole, _ = policy_loss("reinforce", **data, **counts(data))
    shares = [
        policy_loss("reinforce", **{key: value[half] for key, value in data.items()}, **counts(data))[0]
        for half in (slice(0, 3), slice(3, 8))
    ]
    assert [expected, expected] == pytest.approx([float(whole), float(sum(shares))])


def test_decoupled_ppo_is_ppo_weighed_per_token() -> None:
    data = batch(seed=3)
    plain = loss_of("decoupled_ppo", data, clip_dual=3.0)[0]
    weights = importance_weights(data["old_log_probs"], data["rollout_log_probs"], data["response_mask"], bound="none")[
        0
    ]
    corrected = loss_of("ppo", {**data, "rollout_weights": weights})[0]
    assert plain == pytest.approx(corrected)


def test_a_loss_of_whole_sequences_takes_no_weights_of_tokens() -> None:
    data = batch()
    with refused("algorithm.input"):
        loss_of("gmpo", {**data, "rollout_weights": data["advantages"].abs()})
