"""Sums and per-token results of micro-batches, and the samples whose results are not finite."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from jackfield.abc.engine import EngineOutput
from jackfield.sdk.jagged import jagged
from jackfield.sdk.jagged import rows as rows_of
from jackfield.sdk.samples import naming_samples
from jackfield_engines.columns import TokenBuffer
from jackfield_engines.failures import Watch, gather_texts
from jackfield_engines.sums import Sums, zero_of


def test_losses_and_metrics_are_added_up() -> None:
    """Tensors and numbers may be mixed; names say which metrics keep an extreme."""
    sums = Sums()
    sums.add(
        torch.tensor(1.5, requires_grad=True), {"tokens": torch.tensor(3), "a/max": 2.0, "a/min": torch.tensor(2.0)}
    )
    sums.add(0.25, {"tokens": 4, "a/max": torch.tensor(1.0), "a/min": 1.0})
    assert 1.75 == sums.loss()
    assert {"tokens": 7.0, "a/max": 2.0, "a/min": 1.0} == sums.metrics()


def test_sums_do_not_round_to_float32() -> None:
    sums = Sums()
    for _ in range(4):
        sums.add(torch.tensor(1.0), {"count": torch.tensor(2**24 + 1)})
        sums.add(torch.tensor(2.0**-25), {})
    assert 4 + 2.0**-23 == sums.loss()
    assert {"count": 4.0 * (2**24 + 1)} == sums.metrics()


def test_a_zero_has_gradients_of_zero() -> None:
    values = torch.ones(3, requires_grad=True)
    zero = zero_of(values, None)
    zero.backward()
    assert 0.0 == float(zero.detach())
    assert [0.0] * 3 == (torch.full((3,), torch.nan) if values.grad is None else values.grad).tolist()


def test_results_come_back_in_the_order_of_the_rows() -> None:
    """Whatever the order of micro-batches; a row that none has is 0, and so is one without tokens empty."""
    buffer = TokenBuffer(torch.tensor([2, 0, 3, 1]))
    buffer.add(torch.tensor([2, 0]), torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [[4.0, 5.0], [], [1.0, 2.0, 3.0], [0.0]] == [row.tolist() for row in rows_of(buffer.nested())]
    assert 0 == TokenBuffer(torch.zeros(0, dtype=torch.int64)).nested().size(0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_named(bad: float) -> None:
    """By their results or their columns, once each, until the passes are forgotten."""
    watch = Watch()
    data = TensorDict({"advantages": jagged([torch.ones(2), torch.tensor([bad])]), "ids": torch.tensor([1, 2])}, [2])
    output = EngineOutput(loss=0.0, log_probs=jagged([torch.zeros(2), torch.zeros(1)]), metrics={})
    with naming_samples(["one", "two"]):
        watch.add(data, output)
        watch.add(data, output)
    results = EngineOutput(loss=0.0, log_probs=jagged([torch.tensor([0.0, bad])]), metrics={})
    with naming_samples(["three"]):
        watch.add(TensorDict({}, [1]), results)
    assert ["two", "three"] == watch.names()
    watch.clear()
    assert [] == watch.names()


class Alone:
    """One rank of two; the other one's text is empty."""

    rank, size, device = 1, 2, torch.device("cpu")

    def maximum(self, value: int) -> int:
        return value + 1

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        return value


def test_texts_of_ranks_may_differ_in_length() -> None:
    assert ["", "é, ü"] == gather_texts("é, ü", Alone())
