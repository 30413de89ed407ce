"""Replacements of the library's operators: norms, decode attention, and rounding through float8.

The library's ``sdpa`` calls a blocked kernel that is made for many queries: with one query it needs up to 1.5 times the
time of two batched matrix products (256 rows, 24 to 128 positions, one thread). Everything else goes to ``sdpa``.

Rounding simulates an FP8 server: the parameter stays in bfloat16 and has the values of a quantised one. It saves
neither memory nor time; it shows the effect of the rounding on a run, on any device.

Shapes: ``B`` rows, ``Q`` query heads, ``H`` key/value heads, ``L`` positions, ``D`` head dimension.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from jackfield_huggingface.norms import replace_norms


def use_operator(model: nn.Module) -> int:
    """Use torch's operator for norms for which it computes the same; return how many."""
    return replace_norms(model, _rms_norm, 1e-6)


def _rms_norm(self: Any, hidden_states: Tensor) -> Tensor:
    return torch.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


DECODE_ATTENTION = "jackfield_decode"


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
    """Attend ``query`` ``[B, Q, 1, D]`` to ``key`` and ``value`` ``[B, H, L, D]``, by the library's interface.

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


AttentionInterface.register(DECODE_ATTENTION, decode_attention)
AttentionMaskInterface.register(DECODE_ATTENTION, sdpa_mask)


_LARGEST = torch.finfo(torch.float8_e4m3fn).max  # 448


def rounded(tensor: Tensor) -> Tensor:
    """Round to ``float8_e4m3fn`` times a scale (largest magnitude / 448); float32, same shape."""
    values = tensor.detach().float()
    largest = values.abs().max() if values.numel() else values.new_zeros(())
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    return (values / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn).float() * scale


def rounded_names(module: Any) -> frozenset[str]:
    """Return the weights that FP8 servers quantise: those of linear layers except the output layer."""
    head = module.get_output_embeddings()
    return frozenset(
        f"{name}.weight" for name, each in module.named_modules() if isinstance(each, nn.Linear) and each is not head
    )
