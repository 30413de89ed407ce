"""Decode passes of well-known models, without the library's forward: a third of its operations, no arguments to check.

A pass of one token per row spends more time between operations than in them. Prefill passes are the library's, and
so are all passes of other models. A server compares its decode passes with the library's when it starts.

Shapes: ``B`` rows, ``H`` key/value heads, ``Q`` query heads, ``D`` head dimension, ``V`` vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jackfield_rollout_transformers.cache import BatchCache
from jackfield_rollout_transformers.model import DECODE_ATTENTION, LoadedModel, attend

_KNOWN = {f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def supports(model: LoadedModel) -> bool:
    """Return whether :class:`DirectDecode` computes what the model's own forward does."""
    kind, config = type(model.module), model.module.config
    known = kind.__module__.startswith("transformers.models.") and kind.__name__ in _KNOWN
    return known and config._attn_implementation == DECODE_ATTENTION and config.hidden_act in ("silu", "swish")


class DirectDecode:
    """The forward of a decode pass."""

    def __init__(self, model: LoadedModel) -> None:
        base = model.module.model
        self._embeddings, self._rotary, self._norm, self._head = (
            base.embed_tokens, base.rotary_emb, base.norm, model.output_layer,
        )  # fmt: skip
        self._layers = list(base.layers)

    def __call__(self, tokens: Tensor, positions: Tensor, mask: Tensor, cache: BatchCache) -> Tensor:
        """Return logits ``[B, V]`` after ``tokens`` ``[B]``, which stand at ``positions`` ``[B]``.

        ``mask`` is additive, ``[B, 1, 1, L]``. The cache stores keys and values (:meth:`BatchCache.begin_decode`).
        """
        hidden = F.embedding(tokens, self._embeddings.weight)
        # the one call of a module, whose hooks run: conformance sees by it that a pass runs
        cos, sin = self._rotary(hidden, positions[:, None])  # [B, 1, D]
        half = sin.shape[-1] // 2
        signed = torch.cat((-sin[..., :half], sin[..., half:]), -1)
        for layer, stored in zip(self._layers, cache.layers, strict=True):
            attention, mlp = layer.self_attn, layer.mlp
            normed = layer.input_layernorm.forward(hidden)
            heads = (len(hidden), -1, attention.head_dim)
            queries = _rotated(attention, "q", normed, heads, cos, signed)
            keys = _rotated(attention, "k", normed, heads, cos, signed)
            values = _linear(attention.v_proj, normed).view(heads)
            keys, values = stored.update(keys[:, :, None], values[:, :, None])
            mixed = attend(queries, keys, values, mask, attention.scaling)
            hidden = hidden + _linear(attention.o_proj, mixed.flatten(1))
            normed = layer.post_attention_layernorm.forward(hidden)
            gated = F.silu(_linear(mlp.gate_proj, normed)).mul_(_linear(mlp.up_proj, normed))
            hidden = hidden + _linear(mlp.down_proj, gated)
        return _linear(self._head, self._norm.forward(hidden))


def _linear(layer: nn.Module, inputs: Tensor) -> Tensor:
    return F.linear(inputs, layer.weight, layer.bias)  # type: ignore[arg-type]


def _rotated(attention: Any, name: str, normed: Tensor, heads: tuple[int, ...], cos: Tensor, signed: Tensor) -> Tensor:
    """Return queries or keys ``[B, heads, D]`` with rotary embeddings."""
    states = _linear(getattr(attention, f"{name}_proj"), normed).view(heads)
    norm = getattr(attention, f"{name}_norm", None)
    if norm is not None:
        states = norm.forward(states)
    first, second = states.chunk(2, -1)
    return (states * cos).addcmul_(torch.cat((second, first), -1), signed)
