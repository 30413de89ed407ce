"""Attention of one new token per row, for CPUs.

The library's ``sdpa`` calls a blocked kernel that is made for many queries: with one query it needs up to 1.5 times the
time of two batched matrix products (256 rows, 24 to 128 positions, one thread). Everything else goes to ``sdpa``.

Shapes: ``B`` rows, ``Q`` query heads, ``H`` key/value heads, ``L`` positions, ``D`` head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

NAME = "jackfield_decode"


def decode_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The library's attention interface: ``query`` ``[B, Q, 1, D]``, ``key`` and ``value`` ``[B, H, L, D]``.

    Returns ``[B, 1, Q, D]``. ``attention_mask`` is additive, ``[B, 1, 1, L]``.
    """
    plain = all(kwargs.get(name) is None for name in ("softcap", "position_bias", "s_aux", "cache"))
    if query.shape[2] != 1 or attention_mask is None or attention_mask.shape[1] != 1 or not plain:
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output, None
    batch, heads, _, dimension = query.shape
    groups = key.shape[1]
    scale = dimension**-0.5 if scaling is None else scaling
    grouped = (query * scale).view(batch, groups, heads // groups, dimension)
    scores = torch.matmul(grouped, key.transpose(2, 3)).add_(attention_mask)
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).view(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, decode_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
