"""Adapters are merged, replaced and refused as a whole; needs no vLLM."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jackfield.errors import JackfieldError, PluginError
from jackfield_rollout_vllm.adapters import MergedAdapter

CONFIG = {"r": 2, "lora_alpha": 4.0, "bias": "none", "use_dora": False}


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    """Two layers; one is a part of a packed parameter."""
    packed = torch.arange(30.0).reshape(6, 5)
    return {"layers.0.q_proj": packed[:4], "layers.0.down_proj": torch.ones(3, 2)}


def adapter(weights: dict[str, torch.Tensor], *modules: str, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        rows, columns = weights[module].shape
        for factor, shape in (("lora_A", (2, columns)), ("lora_B", (rows, 2))):
            tensors[f"base_model.model.{module}.{factor}.weight"] = torch.randn(shape, generator=generator)
    return tensors


def product(tensors: dict[str, torch.Tensor], module: str, scale: float = 2.0) -> torch.Tensor:
    up, down = (tensors[f"base_model.model.{module}.{factor}.weight"] for factor in ("lora_B", "lora_A"))
    return scale * up @ down


def test_an_adapter_replaces_the_one_before(weights: dict[str, torch.Tensor]) -> None:
    """A layer that the second does not adapt is as it was; none is adapted twice."""
    before = {name: tensor.clone() for name, tensor in weights.items()}
    merged = MergedAdapter(weights.get)
    first, second = adapter(weights, *weights), adapter(weights, "layers.0.q_proj", seed=1)
    merged.merge(first, CONFIG)
    for module in weights:
        assert torch.allclose(before[module] + product(first, module), weights[module])
    merged.merge(second, CONFIG)
    assert torch.allclose(before["layers.0.q_proj"] + product(second, "layers.0.q_proj"), weights["layers.0.q_proj"])
    assert torch.equal(before["layers.0.down_proj"], weights["layers.0.down_proj"])


def test_new_weights_are_not_taken_back(weights: dict[str, torch.Tensor]) -> None:
    merged = MergedAdapter(weights.get)
    tensors = adapter(weights, "layers.0.down_proj")
    merged.merge(tensors, CONFIG)
    merged.forget()
    weights["layers.0.down_proj"].fill_(7.0)
    merged.merge(tensors, CONFIG)
    assert torch.allclose(7.0 + product(tensors, "layers.0.down_proj"), weights["layers.0.down_proj"])


def test_scales_follow_peft(weights: dict[str, torch.Tensor]) -> None:
    """Patterns match ends of names; rank-stabilised adapters divide by the root."""
    before = weights["layers.0.q_proj"].clone()
    tensors = adapter(weights, "layers.0.q_proj")
    config = {**CONFIG, "use_rslora": True, "alpha_pattern": {"q_proj": 3.0}, "rank_pattern": {"v_proj": 9}}
    MergedAdapter(weights.get).merge(tensors, config)
    assert torch.allclose(before + product(tensors, "layers.0.q_proj", 3.0 / 2**0.5), weights["layers.0.q_proj"])


@pytest.mark.parametrize(
    ("change", "config", "code"),
    [
        (lambda t: t.pop("base_model.model.layers.0.q_proj.lora_B.weight"), CONFIG, "weights.missing"),
        (lambda t: t.update({"base_model.model.gone.lora_A.weight": torch.ones(2, 2)}), CONFIG, "weights.missing"),
        (lambda t: t.update({"model.norm.weight": torch.ones(2)}), CONFIG, "weights.missing"),
        (
            lambda t: t.update({"base_model.model.layers.0.q_proj.lora_A.weight": torch.ones(2, 9)}),
            CONFIG,
            "weights.transfer",
        ),
        (lambda t: None, {**CONFIG, "use_dora": True}, "plugin.capability"),
        (lambda t: None, {"r": 2}, "plugin.capability"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    weights: dict[str, torch.Tensor], change: Any, config: dict[str, Any], code: str
) -> None:
    before = {name: tensor.clone() for name, tensor in weights.items()}
    tensors = adapter(weights, *weights)
    change(tensors)
    with pytest.raises(JackfieldError) as caught:
        MergedAdapter(weights.get).merge(tensors, config)
    assert code == caught.value.code
    assert isinstance(caught.value, PluginError) == (code == "plugin.capability")
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())
