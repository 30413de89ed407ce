"""Adapters are merged, replaced and refused as a whole."""

from __future__ import annotations

from typing import Any

import pytest

from jackfield.errors import WeightsError
from jackfield_huggingface.adapters import MergedAdapter

torch = pytest.importorskip("torch")

CONFIG = {"r": 2, "lora_alpha": 4.0, "bias": "none", "use_dora": False}


@pytest.fixture
def weights() -> dict[str, Any]:
    """Two layers; one is a part of a packed parameter."""
    packed = torch.arange(30.0).reshape(6, 5)
    return {"layers.0.q_proj": packed[:4], "layers.0.down_proj": torch.ones(3, 2)}


def adapter(weights: dict[str, Any], *modules: str, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        rows, columns = weights[module].shape
        for factor, shape in (("lora_A", (2, columns)), ("lora_B", (rows, 2))):
            tensors[f"base_model.model.{module}.{factor}.weight"] = torch.randn(shape, generator=generator)
    return tensors


def product(tensors: dict[str, Any], module: str, scale: float = 2.0) -> Any:
    up, down = (tensors[f"base_model.model.{module}.{factor}.weight"] for factor in ("lora_B", "lora_A"))
    return scale * up @ down


def test_an_adapter_replaces_the_one_before(weights: dict[str, Any]) -> None:
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


def test_dora_scales_each_row_to_its_magnitude(weights: dict[str, Any]) -> None:
    """Each row of the sum is divided by its norm, and multiplied by its magnitude."""
    module = "layers.0.q_proj"
    before, tensors = weights[module].double(), adapter(weights, module)
    tensors[f"base_model.model.{module}.lora_magnitude_vector"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    MergedAdapter(weights.get).merge(tensors, {**CONFIG, "use_dora": True})
    total = before + product(tensors, module).double()
    expected = total / total.norm(dim=1, keepdim=True) * torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    assert torch.allclose(expected.float(), weights[module])


def test_new_weights_are_not_taken_back(weights: dict[str, Any]) -> None:
    merged = MergedAdapter(weights.get)
    tensors = adapter(weights, "layers.0.down_proj")
    merged.merge(tensors, CONFIG)
    merged.forget()
    weights["layers.0.down_proj"].fill_(7.0)
    merged.merge(tensors, CONFIG)
    assert torch.allclose(7.0 + product(tensors, "layers.0.down_proj"), weights["layers.0.down_proj"])


def test_scales_follow_peft(weights: dict[str, Any]) -> None:
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
        (lambda t: None, {**CONFIG, "use_dora": True}, "weights.missing"),
        (lambda t: None, {**CONFIG, "bias": "all"}, "weights.transfer"),
        (lambda t: None, {"r": 2}, "weights.transfer"),
        (lambda t: None, {**CONFIG, "target_modules": ["gate_proj"]}, "weights.missing"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    weights: dict[str, Any], change: Any, config: dict[str, Any], code: str
) -> None:
    before = {name: tensor.clone() for name, tensor in weights.items()}
    tensors = adapter(weights, *weights)
    change(tensors)
    with pytest.raises(WeightsError) as caught:
        MergedAdapter(weights.get, lambda: [*weights, "layers.0.gate_proj"]).merge(tensors, config)
    assert code == caught.value.code
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.items())
