"""Hugging Face's tensors and Megatron-Core's: which belong together, and how one is made of the other, bit for bit.

Megatron merges matrices (queries, keys and values; gate and up) and splits them over tensor-parallel ranks. A
:class:`Piece` is one parameter of Megatron's whole model, and knows both forms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import attrs
import torch

from jackfield_engine_megatron.architecture import Architecture

#: How a parameter is merged and split: the rows of a vocabulary, groups of heads, gate and up, rows, columns, whole.
Form = Literal["vocabulary", "heads", "gated", "columns", "whole"]


@attrs.frozen(kw_only=True)
class Piece:
    """One parameter of Megatron's model, and the tensors of a checkpoint that make it."""

    name: str  #: Megatron's name, with ``{layer}`` of the stage's own count and ``{expert}`` of the rank's
    form: Form
    tensors: Mapping[str, tuple[int, ...]]  #: names and shapes in the checkpoint
    layer: int | None = None  #: from 0; None: outside of the layers
    expert: int | None = None  #: from 0; None: not an expert's
    last_stage: bool = False  #: outside of the layers: whether it is on the last stage

    @property
    def is_split(self) -> bool:
        """Return whether tensor-parallel ranks have different parts; an expert is not split."""
        return self.form != "whole" and self.expert is None

    def shard(self, tensors: Sequence[torch.Tensor], rank: int, size: int, sizes: Architecture) -> torch.Tensor:
        """Return the part of tensor-parallel ``rank`` of ``size``; ``tensors`` are those of the checkpoint, in order.

        Rows that pad a vocabulary are added by the caller.
        """
        if not self.is_split:
            return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
        if self.form == "columns":
            return tensors[0].chunk(size, dim=1)[rank]
        if self.form == "gated":
            return torch.cat([each.chunk(size)[rank] for each in tensors])
        if self.form == "heads":
            groups = [_by_group(each, sizes.key_heads) for each in tensors]
            return torch.cat(groups, dim=1).chunk(size)[rank].flatten(0, 1)
        return tensors[0]

    def whole(self, shards: Sequence[torch.Tensor], sizes: Architecture) -> dict[str, torch.Tensor]:
        """Return the checkpoint's tensors, made of the parts of all tensor-parallel ranks, in order."""
        found: Sequence[torch.Tensor]
        if self.form == "gated":
            halves = [shard.chunk(2) for shard in shards]
            found = [torch.cat([half[index] for half in halves]) for index in (0, 1)]
        elif self.form == "heads":
            rows = [shape[0] // sizes.key_heads for shape in self.tensors.values()]
            parts = _by_group(torch.cat(list(shards)), sizes.key_heads).split(rows, dim=1)
            found = [part.flatten(0, 1) for part in parts]
        elif self.form == "columns":
            found = [torch.cat(list(shards), dim=1)]
        else:
            found = [torch.cat(list(shards)) if len(shards) > 1 else shards[0]]
        pairs = zip(self.tensors.items(), found, strict=True)
        return {name: tensor[: shape[0]].contiguous() for (name, shape), tensor in pairs}


def _by_group(tensor: torch.Tensor, groups: int) -> torch.Tensor:
    return tensor.view(groups, tensor.shape[0] // groups, *tensor.shape[1:])


def pieces(sizes: Architecture) -> Iterator[Piece]:
    """Yield every parameter of the whole model, in the order of a checkpoint."""
    hidden, words = sizes.hidden_size, (sizes.vocabulary, sizes.hidden_size)
    embedding = {"model.embed_tokens.weight": words}
    yield Piece(name="embedding.word_embeddings.weight", form="vocabulary", tensors=embedding)
    for layer in range(sizes.layers):
        yield from _attention(sizes, layer)
        prefix, ours = f"model.layers.{layer}", "decoder.layers.{layer}"
        norms = {"input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}
        for name, theirs in norms.items():
            tensors = {f"{prefix}.{theirs}.weight": (hidden,)}
            yield Piece(name=f"{ours}.{name}.weight", form="whole", layer=layer, tensors=tensors)
        if sizes.has_experts(layer):
            yield from _experts(sizes, layer)
        else:
            yield from _mlp(f"{prefix}.mlp", f"{ours}.mlp", hidden, sizes.intermediate_size, layer)
    final = {"model.norm.weight": (hidden,)}
    yield Piece(name="decoder.final_layernorm.weight", form="whole", tensors=final, last_stage=True)
    if not sizes.tied:
        output = {"lm_head.weight": words}
        yield Piece(name="output_layer.weight", form="vocabulary", tensors=output, last_stage=True)


def _attention(sizes: Architecture, layer: int) -> Iterator[Piece]:
    theirs, ours = f"model.layers.{layer}.self_attn", "decoder.layers.{layer}.self_attention"
    hidden, queries, keys = sizes.hidden_size, sizes.heads * sizes.head_size, sizes.key_heads * sizes.head_size
    rows = {"q": queries, "k": keys, "v": keys}
    matrices = {f"{theirs}.{each}_proj.weight": (count, hidden) for each, count in rows.items()}
    yield Piece(name=f"{ours}.linear_qkv.weight", form="heads", layer=layer, tensors=matrices)
    if sizes.qkv_bias:
        biases = {f"{theirs}.{each}_proj.bias": (count,) for each, count in rows.items()}
        yield Piece(name=f"{ours}.linear_qkv.bias", form="heads", layer=layer, tensors=biases)
    output = {f"{theirs}.o_proj.weight": (hidden, queries)}
    yield Piece(name=f"{ours}.linear_proj.weight", form="columns", layer=layer, tensors=output)
    for each in ("q", "k") if sizes.qk_norm else ():
        norm = {f"{theirs}.{each}_norm.weight": (sizes.head_size,)}
        yield Piece(name=f"{ours}.{each}_layernorm.weight", form="whole", layer=layer, tensors=norm)


def _mlp(
    theirs: str,
    ours: str,
    hidden: int,
    size: int,
    layer: int,
    expert: int | None = None,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Piece]:
    gate, up, down = (f"{theirs}.{name}.weight" for name in names)
    at = {"layer": layer, "expert": expert}
    both = {gate: (size, hidden), up: (size, hidden)}
    yield Piece(name=f"{ours}.linear_fc1.weight", form="gated", tensors=both, **at)  # type: ignore[arg-type]
    yield Piece(name=f"{ours}.linear_fc2.weight", form="columns", tensors={down: (hidden, size)}, **at)  # type: ignore[arg-type]


def _experts(sizes: Architecture, layer: int) -> Iterator[Piece]:
    experts, hidden = sizes.experts, sizes.hidden_size
    assert experts is not None, "the layer has experts"
    mixtral = sizes.model_type == "mixtral"
    theirs = f"model.layers.{layer}.{'block_sparse_moe' if mixtral else 'mlp'}"
    ours = "decoder.layers.{layer}.mlp"
    names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    router = {f"{theirs}.gate.weight": (experts.count, hidden)}
    yield Piece(name=f"{ours}.router.weight", form="whole", layer=layer, tensors=router)
    for expert in range(experts.count):
        local, their_expert = f"{ours}.experts.local_experts.{{expert}}", f"{theirs}.experts.{expert}"
        yield from _mlp(their_expert, local, hidden, experts.intermediate_size, layer, expert, names)
    if experts.shared_size:
        yield from _mlp(f"{theirs}.shared_expert", f"{ours}.shared_experts", hidden, experts.shared_size, layer)
        gate = {f"{theirs}.shared_expert_gate.weight": (1, hidden)}
        yield Piece(name=f"{ours}.shared_experts.gate_weight", form="whole", layer=layer, tensors=gate)
