"""Modules of a layer that Megatron-Core has for CUDA alone: attention by PyTorch's own kernels, and RMS norms.

Shapes: ``s`` positions of this rank, ``S`` of all context-parallel ranks, ``b`` rows, ``h`` heads, ``g`` key-value
heads, ``D`` head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn


def own_positions(length: int, rank: int, size: int, device: torch.device | None = None) -> torch.Tensor:
    """Return the positions, int64 ``[length / size]``, that a context-parallel rank has: two pieces, as Megatron cuts.

    Of ``2 * size`` pieces, rank ``r`` has pieces ``r`` and ``2 * size - 1 - r``, so that all have the same work.
    """
    pieces = torch.arange(length, device=device).view(2 * size, -1)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


class CausalAttention(MegatronModule):
    """Causal attention by ``scaled_dot_product_attention``. Padding is on the right, so no other mask is needed.

    With context parallelism, each rank gathers the keys and values of all, and attends from its own positions.
    """

    def __init__(self, config: TransformerConfig, *, pg_collection: Any, softmax_scale: float | None = None, **_: Any):
        super().__init__(config=config)
        self._group = pg_collection.cp
        self._scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """Return ``[s, b, h * D]`` of queries ``[s, b, h, D]``, keys and values ``[s, b, g, D]``."""
        mask, size = None, self._group.size()
        if size > 1:
            key, value = (gather_from_sequence_parallel_region(each, group=self._group) for each in (key, value))
            length, device = key.shape[0], key.device
            places = torch.cat([own_positions(length, rank, size, device) for rank in range(size)])
            own = own_positions(length, self._group.rank(), size, device)
            mask = places[None, :] <= own[:, None]
        queries, keys, values = (each.permute(1, 2, 0, 3) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=keys.shape[1] != queries.shape[1],
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)``, computed in float32, as Hugging Face models do."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of the last dimension, in the dtype of ``x``."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)
