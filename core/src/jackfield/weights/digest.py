"""Digests of tensors: what a receipt proves equality with."""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    import torch

__all__ = ["digest"]


def digest(tensor: torch.Tensor) -> str:
    """xxh3_128, in hexadecimal, over dtype name, shape and raw little-endian bytes.

    Any dtype, shape, stride and device; a tensor that is not contiguous or not on the CPU is copied. A digest finds
    errors; it does not withstand forgery.
    """
    import torch

    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    state = xxhash.xxh3_128(f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)}".encode())
    if plain.numel():
        # a tensor of one element counts as contiguous whatever its stride, which a view of bytes does not take
        flat = plain.contiguous().as_strided((plain.numel(),), (1,))
        state.update(flat.view(torch.uint8).numpy().data)
    return state.hexdigest()
