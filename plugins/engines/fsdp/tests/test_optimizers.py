"""Optimizers by name, groups of parameters, averaged weights and frozen parameters, on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield.errors import JackfieldError

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]
Tensors = dict[str, torch.Tensor]

SPEC: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "clip_grad": None}
torchao = pytest.mark.needs("torchao")
NAMES = ["adafactor", "adamw", pytest.param("adamw_8bit", marks=torchao), "muon", "sgd"]
OPTIONS: dict[str, dict[str, Any]] = {"sgd": {"momentum": 0.8, "nesterov": True}}


def spec(name: str, **changes: Any) -> OptimizerSpec:
    return OptimizerSpec(**{**SPEC, "name": name, "options": OPTIONS.get(name, {}), **changes})


def doubled(gradients: Tensors, plain: Tensors) -> None:
    for name, tensor in plain.items():
        tensor.grad = gradients[name].to(tensor.dtype)


def library(name: str, plain: Tensors) -> Iterator[torch.optim.Optimizer]:
    """The optimizers of torch that are compared with, in float64 where they can."""
    every = list(plain.values())
    hidden = [tensor for name, tensor in plain.items() if tensor.ndim == 2 and "embed" not in name]
    rest = [tensor for tensor in every if not any(tensor is each for each in hidden)]
    if name == "adafactor":
        yield torch.optim.Adafactor(every, lr=1e-2, weight_decay=0.1)
    elif name == "muon":
        more: dict[str, Any] = {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.95}
        yield torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, **more)
        yield torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.1)
    elif name == "sgd":
        yield torch.optim.SGD(every, lr=1e-2, momentum=0.8, nesterov=True)
    else:
        yield torch.optim.AdamW(every, lr=1e-2, weight_decay=0.1)


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_those_of_the_library(kit: ModuleType, build: Build, rows: Rows, name: str) -> None:
    """Three steps on the engine's gradients, beside torch's own optimizer on whole tensors."""
    engine, loss = build(optimizer=spec(name)), kit.PolicyLoss(rows)
    dtype = torch.float32 if name == "muon" else torch.float64  # its iterations round to bfloat16
    start = kit.weights(engine)
    plain = {key: tensor.to(dtype, copy=True).requires_grad_() for key, tensor in start.items()}
    optimizers = list(library(name, plain))
    for _ in range(3):
        doubled(kit.gradients(engine, kit.make_batch(rows), loss), plain)
        with torch.no_grad():
            for tensor in plain.values() if name == "sgd" else ():
                tensor.mul_(1.0 - 1e-2 * 0.1)
        for optimizer in optimizers:
            optimizer.step()
        engine.optimizer_step()
    end = kit.weights(engine)
    tolerance = 2e-2 if name == "adamw_8bit" else 1e-3
    for key, tensor in plain.items():
        moved, found = tensor.detach() - start[key].to(dtype), end[key].to(dtype) - start[key].to(dtype)
        assert float((moved - found).norm() / moved.norm()) < tolerance, key


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_has_the_state(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, name: str) -> None:
    """A step after save and load is the step without them, bit for bit; the average is saved, too."""
    batch, loss, chosen = kit.make_batch(rows), kit.PolicyLoss(rows), spec(name, ema_decay=0.5)
    engine = build(optimizer=chosen)
    kit.train(engine, batch, loss, steps=2)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    kit.train(engine, batch, loss)
    other = build(optimizer=chosen, seed=4)
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    kit.train(other, batch, loss)
    assert same(kit.weights(engine), kit.weights(other))
    assert same(engine._optimization.averaged(), other._optimization.averaged())


def same(one: Tensors, other: Tensors) -> bool:
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


@pytest.mark.parametrize(
    ("changes", "code", "where"),
    [
        ({"name": "lion"}, "config.invalid-value", "optimizer.name"),
        ({"name": "muon", "options": {"momentun": 0.9}}, "config.unknown-key", "optimizer.options.momentun"),
        ({"name": "muon", "options": {"momentum": 1.5}}, "config.invalid-value", "optimizer.options.momentum"),
        ({"name": "adamw", "options": {"foreach": True}}, "config.unknown-key", "optimizer.options.foreach"),
        ({"name": "adafactor", "betas": (0.9, 0.95)}, "config.invalid-value", "optimizer.betas"),
        ({"name": "sgd", "eps": 1e-6}, "config.invalid-value", "optimizer.eps"),
        ({"name": "sgd", "options": {"nesterov": True}}, "config.invalid-value", "optimizer.options.nesterov"),
        ({"lr_factors": {"q_proj": 2.0, "router": 2.0}}, "config.invalid-value", "optimizer.lr_factors: router"),
        ({"lr_factors": {"(": 2.0}}, "config.invalid-value", "optimizer.lr_factors"),
        ({"lr_factors": {"q_proj": -1.0}}, "config.invalid-value", "optimizer.lr_factors.q_proj"),
    ],
)
def test_wrong_settings_are_refused(build: Build, changes: dict[str, Any], code: str, where: str) -> None:
    """Unknown names and options, values out of range, and what would have no effect."""
    with pytest.raises(JackfieldError) as caught:
        build(optimizer=OptimizerSpec(**changes))
    assert (code, where) == (caught.value.code, caught.value.where)


def test_a_missing_library_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """8-bit AdamW without torchao."""
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with pytest.raises(JackfieldError) as caught:
        build(optimizer=spec("adamw_8bit"))
    assert "plugin.environment" == caught.value.code


def test_groups_have_their_own_decay_and_rate(kit: ModuleType, build: Build, rows: Rows) -> None:
    """With gradients of zero only the decay moves weights: none where it is excluded, factors elsewhere."""
    excluded: Any = ("norms", "biases", "embeddings")
    factors = {"q_proj": 0.5, "layers.0": 2.0, "_proj": 0.25}
    engine = build(optimizer=spec("adamw", no_decay=excluded, lr_factors=factors), value_head=True)
    before = {name: tensor.clone() for name, tensor in kit.weights(engine).items()}

    def nothing(output: Any, data: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        return (output.log_probs.sum() + output.values.sum()) * 0.0, {}

    kit.train(engine, kit.make_batch(rows), nothing)
    for name, tensor in kit.weights(engine).items():
        first = next((factor for pattern, factor in factors.items() if pattern in name), 1.0)
        decay = 0.0 if "norm" in name or "embed" in name else 1e-2 * 0.1 * first
        assert torch.allclose(before[name] * (1.0 - decay), tensor, rtol=1e-6, atol=0.0), name


@pytest.mark.parametrize("name", ["adamw", "sgd", "muon", "adafactor"])
def test_factors_scale_the_rate_of_every_optimizer(kit: ModuleType, build: Build, rows: Rows, name: str) -> None:
    """A factor of 0 leaves a parameter as it is; the others move."""
    engine = build(optimizer=spec(name, lr_factors={r"\.0\.mlp": 0.0}))
    before = {key: tensor.clone() for key, tensor in kit.weights(engine).items()}
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    still = sorted(key for key, tensor in kit.weights(engine).items() if torch.equal(tensor, before[key]))
    assert sorted(key for key in before if ".0.mlp" in key) == still


def test_the_average_follows_the_weights(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path) -> None:
    """It is that of float64, a skipped step adds nothing, and its export leaves the weights as they are."""
    skipping = spec("adamw", ema_decay=0.75, on_nonfinite="skip")
    engine, batch, loss = build(optimizer=skipping), kit.make_batch(rows), kit.PolicyLoss(rows)
    expected = {name: tensor.double() for name, tensor in kit.weights(engine).items()}
    for _ in range(3):
        kit.train(engine, batch, loss)
        for name, tensor in kit.weights(engine).items():
            expected[name] = 0.75 * expected[name] + 0.25 * tensor.double()
    engine.optimizer_zero_grad()
    with engine.train_mode():
        engine.forward_backward_batch(batch, lambda output, data: ((output.log_probs * torch.nan).sum(), {}))
        engine.optimizer_step()
    weights = kit.weights(engine)
    folder = tmp_path / "averaged"
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(folder), format="huggingface", averaged=True))
    assert same(weights, kit.weights(engine))
    found = kit.weights(build(folder=folder))
    for name, tensor in expected.items():
        assert torch.allclose(tensor.float(), found[name], atol=1e-6), name
        assert not torch.equal(weights[name], found[name]), name


def test_an_average_that_is_not_kept_is_refused(build: Build, tmp_path: Path) -> None:
    """An export of averages needs a decay."""
    engine = build(optimizer=spec("adamw"))
    with pytest.raises(JackfieldError) as caught:
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "a"), format="huggingface", averaged=True))
    assert ("config.invalid-value", "OptimizerSpec.ema_decay") == (caught.value.code, caught.value.where)


def test_model_only_takes_the_averages_of_a_checkpoint(
    kit: ModuleType, build: Build, rows: Rows, tmp_path: Path
) -> None:
    """An export of another process reads them; from a checkpoint without any they are the loaded weights."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    engine, plain = build(optimizer=spec("adamw", ema_decay=0.5)), build(optimizer=spec("adamw"))
    for each, name in ((engine, "averaged"), (plain, "plain")):
        kit.train(each, batch, loss, steps=2)
        each.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / name)))
    other = build(optimizer=spec("adamw", ema_decay=0.5))
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "averaged"), model_only=True))
    assert same(engine._optimization.averaged(), other._optimization.averaged())
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "plain"), model_only=True))
    weights = {f"language_model.{name}": tensor for name, tensor in kit.weights(plain).items()}
    assert same(weights, {name: each.full_tensor() for name, each in other._optimization.averaged().items()})


def test_frozen_parameters_stay(kit: ModuleType, build: Build, rows: Rows) -> None:
    """They get no gradient, and are published with the others."""
    engine = build(freeze=(r"layers\.0\.", "embed"), optimizer=spec("adamw"))
    before = {name: tensor.clone() for name, tensor in kit.weights(engine).items()}
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows), steps=2)
    frozen = sorted(name for name in before if "layers.0." in name or "embed" in name)
    after = kit.weights(engine)
    assert frozen == sorted(name for name in before if torch.equal(before[name], after[name]))
    assert sorted(set(before) - set(frozen)) == sorted(name for name, _ in engine.get_per_tensor_grad())


def test_frozen_adapters_stay(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Patterns are searched in the names that the adapter has in PEFT's files."""
    engine = build(freeze=(r"q_proj\.lora_A\.weight",), optimizer=spec("adamw"), lora=LoraSpec(rank=2))
    names = [name for name, _ in engine.get_per_tensor_grad()]
    assert not any("q_proj.lora_A" in name for name in names)
    assert any("q_proj.lora_B" in name for name in names)


@pytest.mark.parametrize(("patterns", "where"), [(("router",), "model.freeze: router"), (("",), "model.freeze")])
def test_freezing_nothing_or_everything_is_refused(build: Build, patterns: tuple[str, ...], where: str) -> None:
    """A pattern has an effect, and something is left to train."""
    with pytest.raises(JackfieldError) as caught:
        build(freeze=patterns)
    assert ("config.invalid-value", where) == (caught.value.code, caught.value.where)
