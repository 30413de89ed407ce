"""Digests of tensors: what a receipt proves equality with."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import xxhash

from jackfield.weights.buckets import is_plain

if TYPE_CHECKING:
    import torch

__all__ = ["digest"]


def digest(tensor: torch.Tensor) -> str:
    """xxh3_128, in hexadecimal, over dtype name, shape and raw little-endian bytes.

    Any dtype, shape, stride and device; a tensor that is not contiguous or not on the CPU is copied. A digest finds
    errors; it does not withstand forgery.
    """
    plain = tensor if is_plain(tensor) else tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    state = xxhash.xxh3_128(f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode())
    if size := plain.nbytes:
        # the memory itself: of many small tensors, views of torch and numpy would take longer than hashing
        state.update((ctypes.c_char * size).from_address(plain.data_ptr()))
    return state.hexdigest()
