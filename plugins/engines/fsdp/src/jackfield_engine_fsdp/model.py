"""The module that is sharded: a language model that returns log-probabilities of given tokens; its dropout.

Hugging Face configs name dropout in many ways (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
``router_jitter_noise``, …), and modules hold it as layers or as numbers. Losses compare training passes with inference
passes of the same weights, so all of it is off; ``ModelSpec.dropout`` sets the dropout probability.

Shapes: ``B`` rows, ``S`` padded positions, ``N`` response tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.abc.engine import EngineContext
from jackfield.errors import EngineError
from jackfield.sdk.jagged import length_limits
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.operators import token_statistics
from jackfield_engine_fsdp.packing import Packing, packed_inputs

if TYPE_CHECKING:
    from peft import PeftModel

#: "xdrope" is a rotary embedding; "router_jitter_noise" of PhiMoE's routers is the width of a mask, in inference, too
_RANDOM = re.compile(r"(?<!x)drop|(?<!router_)jitter")
#: not dropout: settings that skip whole layers (ranks would gather different ones) or add noise
_ALWAYS_OFF = re.compile(r"layer_?drop|drop_?path|drop_?connect|jitter")


class Dropout:
    """All dropout of a model, set to one probability; skipped layers and router noise are off.

    Pass the model as it was loaded, before an adapter with its own dropout is added.
    """

    def __init__(self, model: nn.Module, probability: float) -> None:
        self.probability = probability
        self._loaded = [(values, dict(values)) for values in _config_values(model)]
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = probability
            _set_numbers(vars(module), probability)
        for values, _ in self._loaded:
            _set_numbers(values, probability)

    @contextmanager
    def config_as_loaded(self) -> Iterator[None]:
        """Restore the original dropout in the model's configs inside the block, for saving them."""
        for values, loaded in self._loaded:
            values.update({name: value for name, value in loaded.items() if _RANDOM.search(name)})
        try:
            yield
        finally:
            for values, _ in self._loaded:
                _set_numbers(values, self.probability)

    def set_training(self, model: nn.Module, training: bool) -> None:
        """Set the mode; without dropout, only checkpointing and adapters' dropout get training mode.

        In training mode some models draw random numbers regardless of dropout (routers that sample their experts) or
        clip their weights; in evaluation mode they do neither.
        """
        nn.Module.train(model, training and self.probability > 0.0)
        for name, module in model.named_modules() if training else ():
            if getattr(module, "gradient_checkpointing", False) or ".lora_dropout." in name:
                module.training = True


def _config_values(model: nn.Module) -> list[dict[str, Any]]:
    """Return the attributes of each config of ``model``'s modules, nested configs included."""
    found: dict[int, PreTrainedConfig] = {}
    open_configs = [getattr(module, "config", None) for module in model.modules()]
    while open_configs:
        config = open_configs.pop()
        if isinstance(config, PreTrainedConfig) and id(config) not in found:
            found[id(config)] = config
            open_configs += vars(config).values()
    return [vars(config) for config in found.values()]


def _set_numbers(values: dict[str, Any], probability: float) -> None:
    for name, value in values.items():
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if is_number and 0 <= value <= 1 and _RANDOM.search(name):
            values[name] = 0.0 if _ALWAYS_OFF.search(name) else probability


class Rotary:
    """The dependence of a loaded model's rotary embeddings on the lengths of rows.

    The library derives the frequencies from the number of positions of a pass, and keeps those of the longest so far.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.limits = length_limits(model.config.get_text_config().to_dict())
        attributes = ("rope_type", "original_max_seq_len")
        modules = model.modules() if "dynamic" in self.limits else ()
        self._stateful = [module for module in modules if all(hasattr(module, name) for name in attributes)]

    def side(self, length: int) -> tuple[int, ...]:
        """Return the class of rows of ``length`` tokens (prompt and response); a pass has one class."""
        return tuple(
            0 if length <= limit else length if kind == "dynamic" else 1 for kind, limit in self.limits.items()
        )

    def reset(self) -> None:
        """Forget the frequencies of earlier passes."""
        for module in self._stateful:
            kinds: Any = module.rope_type
            for prefix in [f"{layer_type}_" for layer_type in kinds] if isinstance(kinds, dict) else [""]:
                original = getattr(module, f"{prefix}original_inv_freq", None)
                if original is not None:
                    setattr(module, f"{prefix}inv_freq", original.to(getattr(module, f"{prefix}inv_freq").device))
                    setattr(module, f"{prefix}max_seq_len_cached", module.original_max_seq_len)


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
    dtypes in which parameters that are kept in float32 are published, by their names in the language model. ``packs``
    says whether its attention takes packed tokens.
    """

    def __init__(
        self,
        language_model: PreTrainedModel | PeftModel,
        value_head: nn.Linear | None,
        config: Config,
        context: EngineContext,
        *,
        dtype: torch.dtype,
        published_dtypes: Mapping[str, torch.dtype],
        dropout: Dropout,
        packs: bool,
    ) -> None:
        super().__init__()
        self.dtype, self.published_dtypes, self.dropout, self.packs = dtype, published_dtypes, dropout, packs
        self.language_model, self.value_head = language_model, value_head
        self.with_log_probs = context.role != "critic"
        self.temperature, self.logits_chunk = context.temperature, config.logits_chunk
        self.rotary = Rotary(self.causal_lm)
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
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        want_entropy: bool,
        packed: tuple[torch.Tensor, Packing] | None = None,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropy and values of ``N`` tokens: float32 ``[N]``, None if not computed.

        ``input_ids`` are int64 ``[B, S]``, ``labels`` int64 ``[N]``; ``positions``, int64 ``[N]``, are the indices into
        the flattened ``[B * S]`` where each label is predicted. ``packed`` tokens, ``[1, S]``, have positions in their
        rows, int64 ``[1, S]``, and a packing.
        """
        log_probs = entropy = None
        inputs: dict[str, Any] = {"input_ids": input_ids, "use_cache": False}
        if packed is not None:
            inputs |= packed_inputs(*packed)
        self.rotary.reset()
        self._positions = positions
        try:
            if self.with_log_probs:
                logits_NV = self.causal_lm(**inputs).logits
                hidden_NH = self._hidden
                log_probs, entropy = token_statistics(
                    logits_NV, labels, self.temperature, want_entropy, self.logits_chunk
                )
            else:
                hidden_BSH = self.causal_lm.base_model(**inputs).last_hidden_state
                hidden_NH = hidden_BSH.flatten(0, 1).index_select(0, positions)
        finally:
            self._positions = self._hidden = None
        if self.value_head is None:
            return log_probs, entropy, None
        assert hidden_NH is not None, "the output layer has run"
        values = self.value_head(hidden_NH.to(self.value_head.weight.dtype)).float().sum(-1)  # FSDP warns of views
        return log_probs, entropy, values


def shard(model: TokenModel, mesh: DeviceMesh, config: Config) -> FSDPModule:
    """Shard every parameter of ``model`` over ``mesh`` in place; gradients are *summed* over its ranks. Return it."""
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


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return a model's decoder layers; none if the library does not name them."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _layers_to_wrap(model: TokenModel, config: Config) -> list[nn.Module]:
    layers = decoder_layers(model.causal_lm)
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
