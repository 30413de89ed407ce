"""LoRA adapters, merged into the weights that they adapt."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from jackfield.errors import PluginError, WeightsError

__all__ = ["MergedAdapter"]

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.(?P<factor>lora_A|lora_B)(\.default)?\.weight")
#: Settings of PEFT that are more than a product of two matrices, with the value at which they are off.
_MORE = {"use_dora": False, "bias": "none", "fan_in_fan_out": False, "modules_to_save": None, "lora_bias": False}


class MergedAdapter:
    """Knows the weights as they were, so that one adapter replaces another.

    Args:
        find: the weight of a module, a part of a parameter or all of it; None: there is none that is whole.
    """

    def __init__(self, find: Callable[[str], torch.Tensor | None]) -> None:
        self._find = find
        self._bases: dict[str, torch.Tensor] = {}  #: by module

    def forget(self) -> None:
        """All weights are new, and nothing is adapted."""
        self._bases.clear()

    @torch.no_grad()
    def merge(self, tensors: Mapping[str, torch.Tensor], peft_config: Mapping[str, Any]) -> None:
        """Replace the adapter that is merged, if one is. Refuses all of it before it changes anything.

        Args:
            tensors: all of the adapter, under PEFT's names.
            peft_config: what PEFT calls ``LoraConfig``.

        Raises:
            PluginError: ``plugin.capability``: a setting that is more than LoRA of linear layers.
            WeightsError: ``weights.missing`` for an unknown tensor or half a pair; ``weights.transfer`` for a shape.
        """
        _check_config(peft_config)
        weights = {module: self._weight(module, pair) for module, pair in _pairs(tensors).items()}
        pairs = _pairs(tensors)
        for module, base in self._bases.items():
            weight = self._find(module)
            assert weight is not None, "it has been adapted before"
            weight.copy_(base)
        for module, weight in weights.items():
            base = self._bases.setdefault(module, weight.clone())
            down, up = (pairs[module][factor].to(weight.device, torch.float32) for factor in ("lora_A", "lora_B"))
            weight.copy_(base.float() + _scale(module, peft_config) * up @ down)

    def _weight(self, module: str, pair: Mapping[str, torch.Tensor]) -> torch.Tensor:
        missing = [factor for factor in ("lora_A", "lora_B") if factor not in pair]
        if missing:
            raise WeightsError(f"the adapter lacks {module}.{missing[0]}", code="weights.missing", where=module)
        weight = self._find(module)
        if weight is None:
            raise WeightsError(f"the model has no linear layer {module}", code="weights.missing", where=module)
        shape = (pair["lora_B"].shape[0], pair["lora_A"].shape[1])
        if shape != tuple(weight.shape) or pair["lora_B"].shape[1] != pair["lora_A"].shape[0]:
            raise WeightsError(
                f"the adapter of {module} has another shape than the layer",
                where=module,
                expected=list(weight.shape),
                found=[list(pair[factor].shape) for factor in ("lora_B", "lora_A")],
            )
        return weight


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Factors by module."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise WeightsError(f"{name} is no tensor of a LoRA adapter", code="weights.missing", where=name)
        found.setdefault(match["module"], {})[match["factor"]] = tensor
    return found


def _check_config(peft_config: Mapping[str, Any]) -> None:
    more = [name for name, off in _MORE.items() if peft_config.get(name) not in (off, None)]
    if more or not {"r", "lora_alpha"} <= peft_config.keys():
        raise PluginError(
            "the rollout server 'vllm' cannot load this adapter",
            code="plugin.capability",
            expected="LoRA of linear layers, with r and lora_alpha",
            found={name: peft_config.get(name) for name in more or ("r", "lora_alpha")},
        )


def _scale(module: str, peft_config: Mapping[str, Any]) -> float:
    rank = _of(module, peft_config.get("rank_pattern"), peft_config["r"])
    alpha = _of(module, peft_config.get("alpha_pattern"), peft_config["lora_alpha"])
    return float(alpha) / (float(rank) ** 0.5 if peft_config.get("use_rslora") else float(rank))


def _of(module: str, pattern: Mapping[str, Any] | None, default: Any) -> Any:
    """PEFT's own rule: a pattern matches the end of a module's name."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return default
