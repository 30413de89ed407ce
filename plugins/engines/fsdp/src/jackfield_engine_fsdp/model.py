"""The module that is sharded: a language model that returns log-probabilities of given tokens; its dropout.

Hugging Face configs name dropout in many ways (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
``router_jitter_noise``, …), and modules hold it as layers or as numbers. Losses compare training passes with inference
passes of the same weights, so all of it is off; ``ModelSpec.dropout`` sets the dropout probability.

Shapes: ``B`` rows, ``S`` padded positions, ``N`` response tokens, ``H`` hidden size, ``V`` vocabulary.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, TypeGuard

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.abc.engine import EngineContext
from jackfield.sdk.jagged import length_limits
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.experts import Experts
from jackfield_engine_fsdp.operators import token_statistics
from jackfield_engine_fsdp.packing import Packer, Packing
from jackfield_engines.output_layer import FusedOutput
from jackfield_huggingface.images import ImageInputs, Images

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
    it does to its logits (soft caps, scales). Where the logits of a pass would be more than ``logits_chunk``, the
    output layer gets one position, and ``fused`` computes the rest in pieces.

    No attention mask is passed: with causal attention a token never sees the padding to its right.

    Passes compute in ``dtype``, the model's own, whatever the dtype of its parameters. ``published_dtypes`` has the
    dtypes in which parameters that are kept in float32 are published, by their names in the language model. ``packs``
    says how its attention takes packed tokens, ``images`` what it takes beside tokens.
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
        packs: Packer | None,
        images: ImageInputs | None = None,
        experts: Experts | None = None,
        fused: FusedOutput | None = None,
    ) -> None:
        super().__init__()
        self.experts, self.fused = experts, fused
        self.dtype, self.published_dtypes, self.dropout, self.packs = dtype, published_dtypes, dropout, packs
        self.images = images
        self.language_model, self.value_head = language_model, value_head
        self.with_log_probs = context.role != "critic"
        self.temperature, self.logits_chunk = context.temperature, config.logits_chunk
        self.rotary = Rotary(self.causal_lm)
        self._positions: torch.Tensor | None = None
        self._fuses = False
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
        return (self._hidden[:1].detach() if self._fuses else self._hidden, *rest)

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        want_entropy: bool,
        packed: tuple[torch.Tensor, Packing | None] | None = None,
        images: Sequence[Images | None] = (),
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Return log-probabilities, entropy and values of ``N`` tokens: float32 ``[N]``, None if not computed.

        ``input_ids`` are int64 ``[B, S]``, ``labels`` int64 ``[N]``; ``positions``, int64 ``[N]``, are the indices into
        the flattened ``[B * S]`` where each label is predicted. ``packed`` tokens, ``[1, S]``, have positions in their
        rows, int64 ``[1, S]``, and a packing. ``images`` are those of each row; empty: there are none.
        """
        log_probs = entropy = None
        inputs: dict[str, Any] = {"use_cache": False}
        if self.packs is not None:
            self.packs.state.packing = None
            inputs |= {} if packed is None else self.packs.inputs(*packed)
        seen: AbstractContextManager[dict[str, torch.Tensor]] = nullcontext({"input_ids": input_ids})
        if images:
            assert self.images is not None, "rows with images are refused before"
            seen = self.images.given(self.causal_lm, input_ids, images)
        self.rotary.reset()
        self._positions, self._fuses = positions, self._is_large(len(positions))
        try:
            with seen as tokens:
                output = (self.causal_lm if self.with_log_probs else self.causal_lm.base_model)(**tokens, **inputs)
            if self.with_log_probs:
                hidden_NH = self._hidden
                log_probs, entropy = self._statistics(output.logits, labels, want_entropy)
            else:
                hidden_NH = output.last_hidden_state.flatten(0, 1).index_select(0, positions)
        finally:
            self._positions = self._hidden = None
        if self.value_head is None:
            return log_probs, entropy, None
        assert hidden_NH is not None, "the output layer has run"
        values = self.value_head(hidden_NH.to(self.value_head.weight.dtype)).float().sum(-1)  # FSDP warns of views
        return log_probs, entropy, values

    def _is_large(self, tokens: int) -> bool:
        """Return whether the logits of so many tokens are computed in pieces."""
        words = self.causal_lm.get_input_embeddings().num_embeddings
        if self.fused is None or not self.with_log_probs or tokens * words <= self.logits_chunk:
            return False
        return self.fused.fits(self.causal_lm)

    def _statistics(
        self, logits_NV: torch.Tensor, labels: torch.Tensor, want_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return log-probabilities and entropies ``[N]``; ``logits_NV`` has one row if the output layer is fused."""
        arguments = (labels, self.temperature, want_entropy, self.logits_chunk)
        if not self._fuses:
            return token_statistics(logits_NV, *arguments)
        assert self.fused is not None, "only then it fuses"
        assert self._hidden is not None, "the output layer has run"
        return self.fused.statistics(self.causal_lm, self._hidden, *arguments)
