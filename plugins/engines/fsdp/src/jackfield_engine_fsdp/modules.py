"""Changes to a loaded model's modules: dropout, rotary embeddings, and norms on CPUs.

Hugging Face configs name dropout in many ways (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
``router_jitter_noise``, …), and modules hold it as layers or as numbers. Losses compare training passes with inference
passes of the same weights, so all of it is off; ``ModelSpec.dropout`` sets the dropout probability.

The library's norm is a chain of operations, each with a pass over memory, its own backward pass and saved tensors.
Ours makes three forward passes over memory and saves only its input.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from jackfield.sdk.rotary import length_limits
from jackfield_huggingface.norms import replace_norms

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


_NORM_TOLERANCE = 1e-5


class _RMSNorm(torch.autograd.Function):
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension, in the dtype of ``x``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        result: torch.Tensor = (x * scale).mul_(weight)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        (gradient,) = gradients
        x, weight, scale = ctx.saved_tensors
        normed = x * scale
        of_weight = of_x = None
        if ctx.needs_input_grad[1]:
            of_weight = (gradient * normed).flatten(0, -2).sum(0)
        if ctx.needs_input_grad[0]:
            of_normed = gradient * weight
            along = torch.linalg.vecdot(of_normed, normed).unsqueeze(-1).div_(x.shape[-1])
            of_x = of_normed.sub_(normed.mul_(along)).mul_(scale)
        return of_x, of_weight, None


def _forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = _RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)  # type: ignore[no-untyped-call]
    return result


def speed_up_norms(model: nn.Module) -> int:
    """Replace the forward of the model's norms by a faster equivalent; return how many were replaced."""
    return replace_norms(model, _forward, _NORM_TOLERANCE)
