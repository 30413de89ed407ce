"""Tensor parallelism of decoder layers, by the plan that the library has for a model.

Embeddings, output layer and the last norm are not split: FSDP shards them over all ranks. Neither are stacked experts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from transformers import PreTrainedModel

from jackfield.errors import EngineError
from jackfield_engine_fsdp.sharding import hidden_states

_TOLERANCE = 1e-4

#: the library's names of styles; norms of heads get the heads ``[b, S, h, D]`` of their rank
_STYLES: Mapping[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
    "replicated_with_grad_allreduce": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),
}

#: stacked experts stay whole on every rank of a group, which computes all of them
_WHOLE = ("moe_tp_experts", "packed_colwise")


def parallelize(causal_lm: PreTrainedModel, layers: list[nn.Module], mesh: DeviceMesh, trial: bool) -> None:
    """Split the linear layers of decoder ``layers`` over ``mesh`` in place, those with an adapter, too.

    Refuse (``config.invalid-value``) models without a plan, or of sizes that cannot be divided.
    With ``trial``, hidden states of a few tokens are compared with those of the whole model.
    """
    plan = _plan(causal_lm, layers)
    for name, style in plan.items():
        _check_sizes(name, causal_lm.get_submodule(name), style, mesh.size())
    _check_heads(causal_lm, mesh.size())
    tokens = torch.arange(8)[None] * 7919 % causal_lm.get_input_embeddings().num_embeddings
    expected = hidden_states(causal_lm, tokens) if trial else None
    frozen = [name for name, parameter in causal_lm.named_parameters() if not parameter.requires_grad]
    for name, style in plan.items():
        _apply(causal_lm.get_submodule(name), style, mesh)
    for name in frozen:  # torch's style for norms makes new parameters, which would be trained
        causal_lm.get_parameter(name).requires_grad_(False)
    if expected is None:
        return
    try:
        found = hidden_states(causal_lm, tokens)
    except (RuntimeError, TypeError, ValueError, AttributeError) as caught:
        raise _refusal(causal_lm, found=f"{type(caught).__name__}: {caught}") from caught
    difference = float((found - expected).abs().max() / expected.abs().max())
    if not difference <= (_TOLERANCE if causal_lm.dtype == torch.float32 else 0.1):
        raise _refusal(causal_lm, found=f"hidden states that differ by {difference:.2g} of the largest")


def _plan(causal_lm: PreTrainedModel, layers: list[nn.Module]) -> dict[str, str]:
    """Return the style of each module of the decoder layers that the library's plan names."""
    patterns = [(_pattern(name), style) for name, style in (getattr(causal_lm, "_tp_plan", None) or {}).items()]
    inside = {id(module) for layer in layers for module in layer.modules()}
    found: dict[str, str] = {}
    for name, module in causal_lm.named_modules():
        style = next((style for pattern, style in patterns if pattern.fullmatch(name)), None)
        if style is None or style in _WHOLE or id(module) not in inside:
            continue
        if style not in _STYLES:
            raise _refusal(
                causal_lm, expected=f"layers of the styles {', '.join(_STYLES)}", found=f"{name}, of the style {style}"
            )
        found[name] = style
    if not found:
        raise _refusal(causal_lm, expected="a model with a tensor-parallel plan in the library", found="no plan")
    return found


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\*", r"\d+"))


def _check_sizes(name: str, module: nn.Module, style: str, size: int) -> None:
    split = {"colwise": "out_features", "rowwise": "in_features"}.get(style.partition("_")[0])
    length = getattr(module, split, size) if split else size
    if length % size:
        raise EngineError(
            f"{name} has {length} {split}, which cannot be divided over {size} ranks",
            code="config.invalid-value",
            where="tensor_parallel",
            expected=f"a divisor of {length}",
            found=size,
        )


def _check_heads(causal_lm: PreTrainedModel, size: int) -> None:
    config = causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    if heads % size or keys % size:
        raise EngineError(
            f"{heads} attention heads with {keys} heads of keys cannot be divided over {size} ranks",
            code="config.invalid-value",
            where="tensor_parallel",
            expected=f"a divisor of {heads} and of {keys}",
            found=size,
        )


def _apply(module: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Split a module; of one with an adapter, its base and the half of the adapter that has the split dimension."""
    base = getattr(module, "base_layer", None)
    if base is None:
        parallelize_module(module, mesh, _STYLES[style](), src_data_rank=None)
        return
    half: Any = module.lora_B if style.startswith("colwise") else module.lora_A
    for each in (base, *half.values()):
        parallelize_module(each, mesh, _STYLES[style](), src_data_rank=None)


def _refusal(
    causal_lm: PreTrainedModel, *, found: str, expected: str = "the hidden states of the whole model"
) -> EngineError:
    return EngineError(
        f"{type(causal_lm).__name__} cannot be split over ranks by its tensor-parallel plan",
        code="config.invalid-value",
        where="tensor_parallel",
        expected=expected,
        found=found,
        fix="set tensor_parallel to 1: FSDP shards the weights, and sequence_parallel splits long rows",
    )
