"""Distances of log-probs are by sample, without samples that other weights generated."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest
import torch
from tensordict import TensorDict

from jackfield.queue.meta import BatchMeta, Lease
from jackfield.runtime.comparison import Comparison, Distance, Distances, distances
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


def found(rows: list[int], comparison: Comparison, shift: float = 0.5) -> Distances:
    """Compare a training pass 0.1 above inference with a rollout ``shift`` above training, 1 more in row 4."""
    engine = [-torch.arange(1.0, LENGTHS[row] + 1) for row in rows]
    trained = [values + 0.1 for values in engine]
    rollout = [values + shift + (row == 4) for row, values in zip(rows, trained, strict=True)]
    mask = [torch.arange(LENGTHS[row]) != 1 for row in rows]
    table = {"response_mask": mask, "log_probs": engine, "rollout_log_probs": rollout}
    columns = {name: jagged(values) for name, values in table.items()}
    meta = batch().select(rows)
    return distances(jagged(trained), TensorDict(columns, batch_size=[len(rows)]), meta, comparison)


def test_the_distances_of_a_sample_do_not_depend_on_the_others() -> None:
    comparison = Comparison(engine="log_probs", version=7)
    whole, parts = found([0, 1, 2, 3, 4], comparison), [found([1, 2, 4], comparison), found([0, 3], comparison)]
    for kind, samples in whole.items():
        apart = {key: each for part in parts for key, each in part[kind].items()}
        assert {key: pytest.approx(attrs.astuple(each)) for key, each in samples.items()} == {
            key: attrs.astuple(each) for key, each in apart.items()
        }
    assert [2, 1, 3, 1, 4] == [each.tokens for each in whole["train_mode"].values()]
    assert ["row-0", "row-1", "row-4"] == list(whole["rollout"])
    assert (4, 6.0, 6.0, 1.5) == pytest.approx(attrs.astuple(whole["rollout"]["row-4"]))
    assert -0.2 == pytest.approx(whole["train_mode"]["row-0"].signed_sum)


def test_what_filters_explain_is_no_distance() -> None:
    def most(samples: Iterable[Distance]) -> float:
        return max(each.max for each in samples)

    explained = found([0, 1], Comparison(engine="log_probs", version=7, slack=0.5))
    assert 0.0 == pytest.approx(most(explained["rollout"].values()), abs=1e-6)
    lower = found([0, 1], Comparison(engine="log_probs", version=7, slack=float("inf")), shift=-0.5)
    assert 0.5 == pytest.approx(most(lower["rollout"].values()))


def test_without_rows_of_that_version_only_the_engine_is_compared() -> None:
    for rows, version in (([2, 3], 7), ([0, 1], None)):
        assert ["train_mode"] == list(found(rows, Comparison(engine="log_probs", version=version)))
