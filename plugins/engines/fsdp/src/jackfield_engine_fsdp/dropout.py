"""What a model does in training passes alone: dropout of every kind, skipped layers, noise on routers.

Hugging Face configs name it in many ways (``attention_dropout``, ``resid_pdrop``, ``layerdrop``,
``router_jitter_noise``, …), and modules hold it as layers or as numbers. Losses compare training passes with inference
passes of the same weights, so all of it is off; ``ModelSpec.dropout`` sets what is dropout.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

#: "xdrope" is a rotary embedding; "router_jitter_noise" of PhiMoE's routers is the width of a mask, in inference, too
_RANDOM = re.compile(r"(?<!x)drop|(?<!router_)jitter")
#: never a dropout probability: what skips whole layers (ranks would gather different ones), and noise
_ALWAYS_OFF = re.compile(r"layer_?drop|drop_?path|drop_?connect|jitter")


class Dropout:
    """Every dropout of a model, set to one probability; skipped layers and router noise are switched off.

    Args:
        model: as it was loaded, before an adapter is added: that has a dropout of its own.
        probability: from 0 to below 1.
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
        """Inside, the model's configs name the dropout that they came with: they are saved so."""
        for values, loaded in self._loaded:
            values.update({name: value for name, value in loaded.items() if _RANDOM.search(name)})
        try:
            yield
        finally:
            for values, _ in self._loaded:
                _set_numbers(values, self.probability)

    def set_training(self, model: nn.Module, training: bool) -> None:
        """``model.train(training)``, but without dropout only for what needs it: checkpointing, adapters' dropout.

        Some models draw random numbers in training without any probability (routers that sample their experts), or
        clip their weights; in evaluation mode they do neither.
        """
        nn.Module.train(model, training and self.probability > 0.0)
        for name, module in model.named_modules() if training else ():
            if getattr(module, "gradient_checkpointing", False) or ".lora_dropout." in name:
                module.training = True


def _config_values(model: nn.Module) -> list[dict[str, Any]]:
    """The attributes of each config of ``model``'s modules, and of the configs within them."""
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
