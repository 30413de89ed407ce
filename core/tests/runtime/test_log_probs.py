"""Distances of log-probs are summed over data-parallel ranks, without samples that other weights generated."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from jackfield.queue.meta import BatchMeta, Lease
from jackfield.runtime.engine import PREFIX, Comparison, combined, distances
from jackfield.sdk.jagged import jagged

LENGTHS = (3, 1, 4, 2, 5)
VERSIONS: tuple[int | None, ...] = (7, 7, 6, None, 7)  #: None for a sample of an expert


def batch() -> BatchMeta:
    tags = [{} if version is None else {"weight_version_min": version, "weight_version_max": 7} for version in VERSIONS]
    count = len(LENGTHS)
    return BatchMeta(
        keys=tuple(f"row-{index}" for index in range(count)),
        tags=tuple(tags),
        groups=("g",) * count,
        leases=(Lease("train", "trainer", 1),) * count,
    )


def found(rows: list[int], comparison: Comparison, shift: float = 0.5) -> dict[str, float]:
    """Compare a training pass 0.1 above inference with a rollout ``shift`` above training, 1 more in row 4."""
    engine = [-torch.arange(1.0, LENGTHS[row] + 1) for row in rows]
    trained = [values + 0.1 for values in engine]
    rollout = [values + shift + (row == 4) for row, values in zip(rows, trained, strict=True)]
    mask = [torch.arange(LENGTHS[row]) != 1 for row in rows]
    table = {"response_mask": mask, "log_probs": engine, "rollout_log_probs": rollout}
    columns = {name: jagged(values) for name, values in table.items()}
    meta = batch().select(rows)
    return distances(jagged(trained), TensorDict(columns, batch_size=[len(rows)]), meta, comparison)


def test_shares_of_two_ranks_are_the_whole() -> None:
    comparison = Comparison(engine="log_probs", version=7)
    whole = found([0, 1, 2, 3, 4], comparison)
    parts = combined([found([1, 2, 4], comparison), found([0, 3], comparison)])
    assert {name: pytest.approx(value) for name, value in whole.items()} == {name: parts[name] for name in whole}
    assert (2 + 1 + 3 + 1 + 4, 2 + 1 + 4) == (whole[f"{PREFIX}train_mode/tokens"], whole[f"{PREFIX}rollout/tokens"])
    assert 0.5 * 3 + 1.5 * 4 == pytest.approx(whole[f"{PREFIX}rollout/sum"])
    assert 1.5 == pytest.approx(whole[f"{PREFIX}sample/row-4/max"])


def test_what_filters_explain_is_no_distance() -> None:
    explained = found([0, 1], Comparison(engine="log_probs", version=7, slack=0.5))
    assert 0.0 == pytest.approx(explained[f"{PREFIX}rollout/max"], abs=1e-6)
    lower = found([0, 1], Comparison(engine="log_probs", version=7, slack=float("inf")), shift=-0.5)
    assert 0.5 == pytest.approx(lower[f"{PREFIX}rollout/max"])


def test_without_rows_of_that_version_only_the_engine_is_compared() -> None:
    for rows, version in (([2, 3], 7), ([0, 1], None)):
        names = found(rows, Comparison(engine="log_probs", version=version))
        assert {f"{PREFIX}train_mode/{name}" for name in ("tokens", "sum", "max")} == names.keys()
