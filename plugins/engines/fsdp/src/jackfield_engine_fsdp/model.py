"""The module that is sharded: a language model that returns log-probabilities of given tokens.

Shapes: ``B`` rows, ``S`` padded positions, ``N`` response tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from jackfield.errors import EngineError
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.modules import Dropout, Rotary

if TYPE_CHECKING:
    from peft import PeftModel


def has_adapter(model: PreTrainedModel | PeftModel) -> TypeGuard[PeftModel]:
    """Return whether a model is PEFT's. Without an adapter PEFT, which imports slowly, is not imported."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def is_of_adapter(name: str) -> bool:
    """Return whether a parameter of a model with an adapter is one of the adapter's."""
    return ".lora_" in name


class TokenModel(nn.Module):
    """A causal language model over right-padded rows, with an optional adapter and value head.

    Hidden states are narrowed to the wanted positions *before* the output layer, so that logits exist for
    response tokens only. The narrowing is a hook on the output layer, so the model's own forward still applies what
    it does to its logits (soft caps, scales).

    No attention mask is passed: with causal attention a token never sees the padding to its right.

    Passes compute in ``dtype``, the model's own, whatever the dtype of its parameters. ``published_dtypes`` has the
    dtypes in which parameters that are kept in float32 are published, by their names in the language model.
    """

    def __init__(
        self,
        language_model: PreTrainedModel | PeftModel,
        value_head: nn.Linear | None,
        *,
        dtype: torch.dtype,
        published_dtypes: Mapping[str, torch.dtype],
        dropout: Dropout,
        rotary: Rotary,
        with_log_probs: bool,
        temperature: float,
        logits_chunk: int,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.published_dtypes = published_dtypes
        self.dropout = dropout
        self.rotary = rotary
        self.language_model = language_model
        self.value_head = value_head
        self.with_log_probs = with_log_probs
        self.temperature = temperature
        self.logits_chunk = logits_chunk
        self._positions: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None
        output_layer = self.causal_lm.get_output_embeddings()
        assert output_layer is not None, "a causal language model has an output layer"
        output_layer.register_forward_pre_hook(self._narrow)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """Return the transformers model, without the adapter's wrapper."""
        model = self.language_model
        return model.get_base_model() if has_adapter(model) else model

    def train(self, mode: bool = True) -> Self:
        """Set the training mode, but only for the modules in which training is meant to differ."""
        self.dropout.set_training(self, mode)
        return self

    def _narrow(self, _: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden_BSH, *rest = inputs
        assert self._positions is not None, "the output layer runs only inside of TokenModel.forward"
        self._hidden = hidden_BSH.flatten(0, 1).index_select(0, self._positions)
        return (self._hidden, *rest)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropy and values of ``N`` tokens: float32 ``[N]``, None if not computed.

        ``input_ids`` are int64 ``[B, S]``, ``labels`` int64 ``[N]``; ``positions``, int64 ``[N]``, are the indices into
        the flattened ``[B * S]`` where each label is predicted.
        """
        log_probs = entropy = None
        self.rotary.reset()
        self._positions = positions
        try:
            if self.with_log_probs:
                logits_NV = self.causal_lm(input_ids=input_ids, use_cache=False).logits
                hidden_NH = self._hidden
                log_probs, entropy = token_statistics(
                    logits_NV, labels, self.temperature, want_entropy, self.logits_chunk
                )
            else:
                hidden_BSH = self.causal_lm.base_model(input_ids=input_ids, use_cache=False).last_hidden_state
                hidden_NH = hidden_BSH.flatten(0, 1).index_select(0, positions)
        finally:
            self._positions = self._hidden = None
        if self.value_head is None:
            return log_probs, entropy, None
        assert hidden_NH is not None, "the output layer has run"
        values = self.value_head(hidden_NH.to(self.value_head.weight.dtype)).float().sum(-1)  # FSDP warns of views
        return log_probs, entropy, values


def token_statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, want_entropy: bool, chunk: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return float32 log-probabilities of ``labels`` int64 ``[N]``, and entropies.

    The distribution is ``softmax(logits / temperature)``; ``logits`` are ``[N, V]`` of any float dtype. At most
    ``chunk`` of them (at least one row) are in float32 at once; pieces are recomputed in the backward pass.
    """
    rows = max(1, chunk // logits.shape[-1])
    if logits.shape[0] <= rows:
        return _statistics(logits, labels, temperature, want_entropy)
    pieces = []
    for piece, piece_labels in zip(torch.split(logits, rows), torch.split(labels, rows), strict=True):
        arguments = (piece, piece_labels, temperature, want_entropy)
        if torch.is_grad_enabled():
            pieces.append(checkpoint(_statistics, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            pieces.append(_statistics(*arguments))
    entropy = torch.cat([piece[1] for piece in pieces]) if want_entropy else None
    return torch.cat([piece[0] for piece in pieces]), entropy


def _statistics(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, want_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    if not want_entropy:
        return -F.cross_entropy(logits, labels, reduction="none"), None
    all_log_probs = logits.log_softmax(-1)
    log_probs = -F.nll_loss(all_log_probs, labels, reduction="none")
    return log_probs, -(all_log_probs.exp() * all_log_probs).sum(-1)


def shard(model: TokenModel, mesh: DeviceMesh, config: Config) -> FSDPModule:
    """Shard every parameter of ``model`` over ``mesh`` in place; gradients are *summed* over its ranks.

    Returns:
        ``model``, which now is an ``FSDPModule`` too.
    """
    options: dict[str, Any] = {"mesh": mesh}
    if config.mixed_precision == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif model.published_dtypes:  # passes compute in the model's own dtype: only parameters are cast
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=model.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    if config.cpu_offload and mesh.device_type != "cpu":
        options["offload_policy"] = CPUOffloadPolicy()
    for module in _float32_modules(model):
        fully_shard(module, **{**options, "mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)})
    for layer in _layers_to_wrap(model, config):
        fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
    sharded = fully_shard(model, **options)
    if mesh.size() > 1:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)
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


def _layers_to_wrap(model: TokenModel, config: Config) -> list[nn.Module]:
    names = set(getattr(model.causal_lm, "_no_split_modules", None) or ())
    layers = [module for module in model.causal_lm.modules() if type(module).__name__ in names]
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
