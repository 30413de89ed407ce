"""How the parameters of a model are split over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel

from jackfield.errors import EngineError
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.mesh import Mesh
from jackfield_engine_fsdp.model import TokenModel


def shard(model: TokenModel, mesh: Mesh, config: Config) -> FSDPModule:
    """Shard every parameter of ``model`` over ``mesh`` in place; gradients are *summed* over its ranks. Return it.

    Tensor-parallel ranks compute the same gradients of what is not split. Of parameters outside of decoder layers,
    which they share, FSDP takes the average over them.
    """
    options: dict[str, Any] = {"mesh": mesh.layers}
    if config.mixed_precision == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif model.published_dtypes:  # passes compute in the model's own dtype: only parameters are cast
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload and mesh.layers.device_type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for module in _float32_modules(model):
        fully_shard(module, **{**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
    reshard = config.reshard_size if config.reshard_after_forward and config.reshard_size else None
    for layer in _layers_to_wrap(model, config):
        fully_shard(layer, reshard_after_forward=reshard or config.reshard_after_forward, **options)
    sharded = fully_shard(model, **{**options, "mesh": mesh.rest})
    if mesh.sizes.world > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
        sharded.set_gradient_divide_factor(float(mesh.sizes.tensor))
        if hasattr(sharded, "set_reduce_scatter_unused_params"):  # ranks may use different parts of the model
            sharded.set_reduce_scatter_unused_params(True)
    return sharded


def _float32_modules(model: TokenModel) -> list[nn.Module]:
    """Return modules that compute in float32 in a half-precision model (routers of experts)."""
    if model.dtype == torch.float32:
        return []
    kept = {name.rpartition(".")[0] for name, dtype in model.published_dtypes.items() if dtype == torch.float32}
    modules = (model.causal_lm.get_submodule(name) for name in kept)
    return [module for module in modules if not list(module.children())]


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the language model's decoder layers; none if the library does not name them.

    A vision tower's layers are not among them: a rank whose rows have no images does not run them, and would leave the
    others waiting in a collective operation.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    inside = getattr(model.base_model, "language_model", None) or model
    return [module for module in inside.modules() if type(module).__name__ in names]


def _layers_to_wrap(model: TokenModel, config: Config) -> list[nn.Module]:
    layers = decoder_layers(model.causal_lm)
    if config.tensor_parallel > 1:  # their parameters are on another mesh than the rest
        return layers
    if config.wrap == "layers" and not layers:
        raise EngineError(
            f"{type(model.causal_lm).__name__} does not name its decoder layers",
            code="config.invalid-value",
            where="wrap",
            fix="set wrap to root",
        )
    if config.wrap == "auto":
        return [layer for layer in layers if sum(p.numel() for p in layer.parameters()) >= config.wrap_min_parameters]
    return layers if config.wrap == "layers" else []


@torch.no_grad()
def hidden_states(causal_lm: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states of tokens int64 ``[b, S]``, float32 ``[b, S, H]``."""
    last: torch.Tensor = causal_lm.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return last.float()
