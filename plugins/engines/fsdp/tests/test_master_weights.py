"""Models in half precision are trained on weights in float32, and published in their own dtype."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield_engine_fsdp.config import Config

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]
DTYPES = ["bfloat16", "float16"]
SLOW = OptimizerSpec(lr=1e-6, weight_decay=0.1, clip_grad=1.0)


def in_dtype(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """The folder's weights, rounded to a dtype, as float32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, name))
    return {each: parameter.detach().float() for each, parameter in model.named_parameters()}


def masters(engine: Any) -> dict[str, torch.Tensor]:
    """What the engine's optimizer works on."""
    kept = engine._optimization.parameters.items()
    return {name.removeprefix("language_model."): each.full_tensor().detach().clone() for name, each in kept}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrap", ["root", "layers"])
def test_small_updates_add_up(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Path, dtype: str, wrap: Any
) -> None:
    """After some steps at a rate of 1e-6, the weights are where AdamW in float32 takes them from the same gradients.

    What is published is their cast, bit for bit; in a model of the published dtype almost nothing has changed.
    """
    engine = build(Config(wrap=wrap), dtype=dtype, optimizer=SLOW)
    first = in_dtype(model_folder, dtype)
    plain = {name: torch.nn.Parameter(tensor.clone()) for name, tensor in first.items()}
    optimizer = torch.optim.AdamW(plain.values(), lr=1e-6, weight_decay=0.1)
    for _ in range(4):
        gradients = kit.gradients(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        assert {torch.float32} == {gradient.dtype for gradient in gradients.values()}
        for name, parameter in plain.items():
            parameter.grad = gradients[name].clone()
        torch.nn.utils.clip_grad_norm_(plain.values(), 1.0)
        optimizer.step()
        engine.optimizer_step()
    published, kept = kit.weights(engine), masters(engine)
    for name, parameter in plain.items():
        moved = (parameter.detach() - first[name]).abs()
        assert float(moved.mean()) > 1e-6  # four steps of about 1e-6
        torch.testing.assert_close(kept[name] - first[name], parameter.detach() - first[name], rtol=0.05, atol=1e-8)
        assert torch.equal(published[name], kept[name].to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrap", ["root", "layers"])
def test_a_pass_is_that_of_a_model_in_its_dtype(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Path, dtype: str, wrap: Any
) -> None:
    """A replica has the model in its dtype: the log-probabilities are the same bits, before and after a step."""
    engine = build(Config(wrap=wrap), dtype=dtype, micro_batch_tokens=40)
    batch = kit.make_batch(rows)
    for _ in range(2):
        plain = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, dtype))
        plain.load_state_dict(kit.weights(engine), strict=False)
        other = build(Config(wrap=wrap), dtype=dtype, optimizer=None, role="reference", micro_batch_tokens=40)
        with torch.no_grad():
            for name, parameter in other._model.causal_lm.named_parameters():
                parameter.to_local().copy_(dict(plain.named_parameters())[name])
        found = []
        for each in (engine, other):
            with each.eval_mode():
                found.append(each.forward_backward_batch(batch, None, forward_only=True).log_probs.values())
        assert torch.equal(found[1], found[0])
        kit.train(engine, batch, kit.PolicyLoss(rows))


@pytest.mark.parametrize("dtype", DTYPES)
def test_checkpoints_hold_the_masters(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, dtype: str) -> None:
    """Save, load, step is step, bit for bit, where the published weights alone would not be enough."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    engine = build(dtype=dtype, optimizer=SLOW)
    kit.train(engine, batch, loss, steps=3)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    saved, published = masters(engine), kit.weights(engine)
    assert any(not torch.equal(saved[name], published[name].float()) for name in published)
    kit.train(engine, batch, loss, steps=2)
    other = build(dtype=dtype, optimizer=SLOW, seed=4)
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    assert all(torch.equal(saved[name], each) for name, each in masters(other).items())
    kit.train(other, batch, loss, steps=2)
    expected = masters(engine)
    assert all(torch.equal(expected[name], each) for name, each in masters(other).items())
    reader = build(dtype=dtype, optimizer=None)  # as the export of a checkpoint reads it
    reader.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native"), model_only=True))
    assert all(torch.equal(published[name], each) for name, each in kit.weights(reader).items())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_saved_model_is_in_its_dtype(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, dtype: str) -> None:
    """The config names it, and ``from_pretrained`` loads what is published."""
    engine = build(dtype=dtype)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "out"), format="huggingface"))
    assert dtype == json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
    model, published = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), kit.weights(engine)
    assert {getattr(torch, dtype)} == {each.dtype for each in model.parameters()}
    assert all(torch.equal(each, published[name]) for name, each in model.named_parameters())


def test_without_masters_a_warning_says_what_is_lost(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its figure is the share of weights that such an update changes, which a step then shows."""

    def own() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name.startswith("jackfield")]

    spec = OptimizerSpec(lr=1e-4, weight_decay=0.0)
    with caplog.at_level(logging.WARNING, "jackfield"):
        build(dtype="bfloat16", optimizer=spec)
        build(dtype="bfloat16", optimizer=spec, lora=LoraSpec(rank=2))
        build(dtype="bfloat16", optimizer=None)
        build(Config(master_weights=False), optimizer=spec)
        assert not own()
        engine = build(Config(master_weights=False), dtype="bfloat16", optimizer=spec)
    (record,) = own()
    told = float(record.getMessage().partition(" changes ")[2].partition(" %")[0]) / 100
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    first, published = in_dtype(model_folder, "bfloat16"), kit.weights(engine)
    assert {torch.bfloat16} == {tensor.dtype for tensor in published.values()}
    gradients = dict(engine.get_per_tensor_grad())
    total = sum(int((gradients[name] != 0).sum()) for name in first)
    share = sum(int((first[name] != published[name].float()).sum()) for name in first) / total
    assert 0 < told < 0.5
    assert told == pytest.approx(share, rel=0.35)


@pytest.mark.parametrize("mixed", ["none", "bfloat16"])
def test_a_critic_in_half_precision_trains(kit: ModuleType, build: Build, rows: Rows, mixed: Any) -> None:
    """Its head is kept in float32, too."""
    engine = build(Config(mixed_precision=mixed), role="critic", value_head=True, dtype="bfloat16", optimizer=SLOW)
    before = masters(engine)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    after = masters(engine)
    assert {torch.float32} == {tensor.dtype for tensor in after.values()}
    moved = [name for name in after if not torch.equal(before[name], after[name])]
    assert {"value_head.weight", "model.norm.weight"} <= set(moved)
