"""Off-policy correction by the weight version of each token, against weights that are computed one by one."""

from __future__ import annotations

import math

import pytest

from jackfield.algorithms.shaping import Correction

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("stale_only", [False, True])
@pytest.mark.parametrize("most", [None, 0, 2])
@pytest.mark.parametrize("reject", ["none", "token"])
def test_each_token_is_weighted_by_its_own_version(stale_only: bool, most: int | None, reject: str) -> None:
    generator = torch.Generator().manual_seed(3)
    old = torch.randn(6, 9, generator=generator, dtype=torch.float64)
    rollout = old + torch.randn(6, 9, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 9, generator=generator) < 0.8
    staleness = torch.randint(0, 4, (6, 9), generator=generator)
    correction = Correction(enabled=True, stale_only=stale_only, max_token_staleness=most, reject=reject)  # type: ignore[arg-type]
    weights, kept, _ = correction.weights(old, rollout, mask, staleness)
    for row in range(6):
        for at in range(9):
            age, ratio = int(staleness[row, at]), math.exp(float(old[row, at] - rollout[row, at]))
            fresh, outside = stale_only and age <= 0, reject == "token" and not 0.5 <= ratio <= 2.0
            counts = bool(mask[row, at]) and (fresh or not outside) and (most is None or age <= most)
            assert counts == bool(kept[row, at])
            expected = 0.0 if not mask[row, at] else 1.0 if fresh else min(ratio, 2.0)
            assert expected == pytest.approx(float(weights[row, at]))


def test_without_versions_all_tokens_are_weighted() -> None:
    old, rollout = torch.zeros(1, 2), torch.tensor([[-0.5, 0.5]])
    weights, _, _ = Correction(stale_only=True).weights(old, rollout, torch.ones(1, 2, dtype=torch.bool))
    assert [math.exp(0.5), math.exp(-0.5)] == pytest.approx(weights[0].tolist())
