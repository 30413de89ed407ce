"""A digest depends exactly on the dtype, shape and bits of a tensor."""

from __future__ import annotations

import struct

import pytest
import xxhash
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jackfield.sdk.buckets import digest

torch = pytest.importorskip("torch")


def test_dtype_shape_and_bytes_count() -> None:
    base = torch.zeros(2, 6, dtype=torch.int32)
    others = [
        torch.zeros(2, 6, dtype=torch.float32),
        torch.zeros(6, 2, dtype=torch.int32),
        torch.zeros(12, dtype=torch.int32),
        torch.zeros(2, 3, dtype=torch.int64),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros((), dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
    ]
    assert len(others) + 1 == len({digest(tensor) for tensor in (base, *others)})
    assert 32 == len(digest(base))


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=64), st.data())
def test_every_bit_counts(content: bytes, data: st.DataObject) -> None:
    index, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    flipped = tensor.clone()
    flipped[index] ^= 1 << bit
    assume(not torch.equal(tensor, flipped))
    assert digest(tensor) != digest(flipped)
    assert digest(tensor) == digest(tensor.clone())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.bool, torch.complex64]
)
def test_stride_gradient_and_conjugation_do_not_count(dtype: torch.dtype) -> None:
    tensor = torch.randint(0, 2, (4, 6), generator=torch.Generator().manual_seed(0)).to(dtype)
    strided = tensor.t().contiguous().t()
    assert not strided.is_contiguous()
    assert digest(tensor) == digest(strided)
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert digest(tensor) == digest(torch.nn.Parameter(tensor.clone()))
    if dtype.is_complex:
        assert digest(tensor.conj().resolve_conj()) == digest(tensor.conj())
    assert digest(tensor[:2]) != digest(tensor[2:])


def test_negative_zero_and_nan_payloads_count() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    quiet, other = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert digest(quiet) != digest(other)


def test_the_digest_is_what_its_documentation_says() -> None:
    """The digest never changes, since trainer and replicas may have different installations."""
    content = b"float32[2, 3]" + struct.pack("<6f", *range(6))
    assert xxhash.xxh3_128_hexdigest(content) == digest(torch.arange(6, dtype=torch.float32).reshape(2, 3))
    assert xxhash.xxh3_128_hexdigest(b"int64[]" + struct.pack("<q", -3)) == digest(torch.tensor(-3))


def test_a_strided_tensor_has_the_digest_of_its_copy() -> None:
    columns = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    for view in (columns[:, 1], columns.T, columns[::2, ::3], torch.arange(9)[::2], torch.arange(60.0)[5::60]):
        assert digest(view.clone(memory_format=torch.contiguous_format)) == digest(view)
