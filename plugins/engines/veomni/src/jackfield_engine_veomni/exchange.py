"""Exchanges between ranks where VeOmni has kernels for accelerators alone: attention and experts, in plain PyTorch.

Shapes: ``b`` rows, ``S`` tokens of a row, ``s`` those of this rank, ``A`` heads, ``D`` head dimension; ``n`` tokens of
this rank, ``k`` experts of a token, ``E`` experts, ``e`` those of this rank, ``H`` hidden size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.nn.functional import all_to_all_single
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from veomni.distributed.parallel_state import get_parallel_state
from veomni.ops.kernels.attention.ulysses import prepare_ulysses_qkv, restore_ulysses_output

#: The name of causal attention over sequence-parallel ranks by PyTorch's scaled_dot_product_attention.
ULYSSES_SDPA = "jackfield_ulysses_sdpa"


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Return causal attention ``[b, s, A, D]`` of ``[b, A, s, D]``: all of a row's tokens, a part of the heads."""
    state = get_parallel_state()
    group, size = state.ulysses_group, state.ulysses_size
    by_token = [each.transpose(1, 2) for each in (query, key, value)]
    query, key, value, _count = prepare_ulysses_qkv(*by_token, group=group, ulysses_size=size)
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return restore_ulysses_output(output.transpose(1, 2).contiguous(), group=group), None


def _no_mask(*_: Any, **__: Any) -> None:
    """Return no mask: the attention itself is causal, and padding is to the right of all tokens that count."""


def register_attention() -> None:
    """Make :data:`ULYSSES_SDPA` known to transformers."""
    ALL_ATTENTION_FUNCTIONS.register(ULYSSES_SDPA, _attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ULYSSES_SDPA, _no_mask)


class _Share(torch.autograd.Function):
    """The sum over a group, whose ranks all compute the same loss of it: the gradient is that of each summand."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, group: Any) -> torch.Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def shared(values: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the sum of ``values`` over ``group``; the gradient of this rank's summand is that of the sum."""
    result: torch.Tensor = _Share.apply(values, group)  # type: ignore[no-untyped-call]
    return result


def exchange_tokens(experts: Any, size: int) -> None:
    """Have a module of stacked experts, ``e = E / size`` here, send each token to the ranks of its experts."""
    experts.forward = MethodType(_experts, experts)
    experts.local_experts = experts.num_experts // size


def _experts(self: Any, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum ``[n, H]`` of the experts ``top_k_index`` int64 ``[n, k]`` of each token."""
    group, local = get_parallel_state().ep_group, self.local_experts
    order = top_k_index.flatten().argsort(stable=True)
    counts_E = torch.bincount(top_k_index.flatten(), minlength=self.num_experts)
    received_E = torch.empty_like(counts_E)  # by rank that sends, and expert of this one
    dist.all_to_all_single(received_E, counts_E, group=group)
    sent = counts_E.view(-1, local).sum(1).tolist()
    received = received_E.view(-1, local).sum(1).tolist()
    token = order // top_k_index.shape[1]
    arrived = all_to_all_single(
        hidden.new_empty(sum(received), hidden.shape[-1]), hidden[token].contiguous(), received, sent, group=group
    )
    expert = torch.arange(local, device=hidden.device).repeat(len(received)).repeat_interleave(received_E)
    computed = torch.zeros_like(arrived)
    for index in range(local):  # an expert without tokens, too: its gradient is zero, and not missing
        rows = (expert == index).nonzero().squeeze(1)
        gate, up = F.linear(arrived[rows], self.gate_up_proj[index]).chunk(2, dim=-1)
        computed = computed.index_copy(0, rows, F.linear(self.act_fn(gate) * up, self.down_proj[index]))
    returned = all_to_all_single(hidden.new_empty(len(token), hidden.shape[-1]), computed, sent, received, group=group)
    weighted = returned * top_k_weights.flatten()[order, None].to(returned.dtype)
    return torch.zeros_like(hidden).index_add(0, token, weighted)
