"""Jagged tensors return the rows from which they were created."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import DataError
from jackfield.sdk.jagged import from_padded, jagged, lengths, rows, to_padded

torch = pytest.importorskip("torch")

DTYPES = [
    torch.bool,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
]


@st.composite
def row_lists(draw: st.DrawFn) -> list[torch.Tensor]:
    dtype = draw(st.sampled_from(DTYPES))
    trailing = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    return [torch.randint(0, 2, (size, *trailing), generator=generator).to(dtype) for size in sizes]


@settings(deadline=None)  # torch imports much at its first nested tensor
@given(row_lists())
def test_rows_come_back(given_rows: list[torch.Tensor]) -> None:
    nested = jagged(given_rows)
    assert (len(given_rows), given_rows[0].dtype) == (nested.shape[0], nested.dtype)
    assert [len(row) for row in given_rows] == lengths(nested).tolist()
    assert all(torch.equal(row, back) for row, back in zip(given_rows, rows(nested), strict=True))


@settings(deadline=None)
@given(row_lists(), st.integers(0, 3), st.sampled_from([0, 1]))
def test_padding_is_on_the_right_and_comes_off_again(given_rows: list[torch.Tensor], extra: int, padding: int) -> None:
    longest = max(len(row) for row in given_rows)
    padded = to_padded(jagged(given_rows), padding=padding, length=longest + extra)
    assert (len(given_rows), longest + extra) == padded.shape[:2]
    for row, line in zip(given_rows, padded, strict=True):
        assert torch.equal(row, line[: len(row)])
        assert bool((line[len(row) :] == padding).all())
    back = from_padded(padded, torch.tensor([len(row) for row in given_rows]))
    assert all(torch.equal(row, other) for row, other in zip(given_rows, rows(back), strict=True))
    assert longest == to_padded(back).shape[1]


def test_a_view_with_holes_is_padded_by_its_rows() -> None:
    nested = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 0, 2]), layout=torch.jagged
    )
    assert [2, 0, 2] == lengths(nested).tolist()
    assert [[0, 1, -1], [-1, -1, -1], [10, 11, -1]] == to_padded(nested, padding=-1, length=3).tolist()


def test_gradients_flow_through_padding_and_back() -> None:
    weights = [torch.ones(2, requires_grad=True), torch.ones(1, requires_grad=True)]
    padded = to_padded(jagged(weights), length=4)
    (padded * torch.tensor([[1.0, 2.0, 9.0, 9.0], [3.0, 9.0, 9.0, 9.0]])).sum().backward()
    assert [[1.0, 2.0], [3.0]] == [weight.grad.tolist() for weight in weights if weight.grad is not None]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: jagged([]),
        lambda: jagged([torch.zeros(1), torch.zeros(1, dtype=torch.int64)]),
        lambda: jagged([torch.zeros(1, 2), torch.zeros(1, 3)]),
        lambda: to_padded(jagged([torch.zeros(3)]), length=2),
        lambda: from_padded(torch.zeros(2, 3), torch.tensor([4, 1])),
        lambda: from_padded(torch.zeros(2, 3), torch.tensor([1])),
        lambda: rows(torch.zeros(2, 3)),
    ],
    ids=[
        "no rows",
        "two dtypes",
        "two shapes",
        "longer than the padding",
        "length too long",
        "length missing",
        "dense",
    ],
)
def test_what_does_not_fit_is_refused(wrong: object) -> None:
    with pytest.raises(DataError):
        wrong()  # type: ignore[operator]
