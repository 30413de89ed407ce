"""Tests that arrays come back from bytes as they were, and that other values are refused with a reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from jackfield.sdk.arrays import MAXIMUM_ARRAYS, cell, pack, unpack
from jackfield.sdk.cells import join, split
from jackfield_testing import refused

DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float16", "float32", "float64", ">f4", ">i8")
ARRAYS = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(max_dims=4, max_side=4, min_side=0))
)


@given(st.dictionaries(st.text(min_size=1, max_size=8, alphabet="abc_é"), ARRAYS, max_size=4))
def test_arrays_come_back_from_their_column(given_arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    """Names, shapes, dtypes and bits, beside a sample without any; they cannot be written to."""
    column = join("multi_modal_inputs", [cell(given_arrays), cell({})])
    found, none = (unpack(content) for content in split(column)[1])
    assert {} == none
    assert given_arrays.keys() == found.keys()
    for name, array in given_arrays.items():
        assert (array.shape, array.dtype.newbyteorder("=")) == (found[name].shape, found[name].dtype)
        assert np.ascontiguousarray(array, found[name].dtype).tobytes() == found[name].tobytes()
        assert not found[name].flags.writeable


def test_views_are_packed_by_their_values() -> None:
    """The order of memory is not that of the values: a transposed and a sliced array."""
    values = np.arange(24.0).reshape(2, 3, 4)
    for view in (values.T, values[:, ::2], values[::-1]):
        assert np.array_equal(view, unpack(pack({"a": view}))["a"])


@pytest.mark.parametrize(
    "arrays",
    [
        {"a": [1.0]},
        {"a": np.array(1.0)},
        {"a": np.array(["text"])},
        {"a": np.array([object()])},
        {"a": np.zeros(2, np.complex64)},
        {"a": np.zeros(2, np.longdouble)},
        {"a": np.zeros(2, "datetime64[s]")},
        {"": np.zeros(2)},
        {3: np.zeros(2)},
        {"a": np.broadcast_to(np.zeros(1), (1 << 40,))},
        {f"a{number}": np.zeros(1) for number in range(MAXIMUM_ARRAYS + 1)},
    ],
    ids=["list", "scalar", "text", "object", "complex", "long", "date", "no name", "no text", "size", "count"],
)
def test_other_values_are_refused(arrays: dict[Any, Any]) -> None:
    """What is no array of plain numbers, has no text as its name, or is too large."""
    with refused("agent.output"):
        pack(arrays)


@pytest.mark.parametrize("content", [b"", b"no", b"\x80\x04}.", pack({"a": np.zeros(3)})[:-1], b"\xff" * 64])
def test_other_bytes_are_refused(content: bytes) -> None:
    """Nothing is executed and nothing is read beyond the end."""
    with refused("queue.store"):
        unpack(content)
