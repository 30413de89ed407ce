"""Optimizer, schedule, modes, determinism and adapters."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from peft.utils import get_peft_model_state_dict
from transformers import AutoModelForCausalLM

from jackfield.abc.engine import LoraSpec, OptimizerSpec
from jackfield.errors import EngineError
from jackfield_engine_fsdp.config import Config

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("clip_grad", [None, 0.05, 1e9])
def test_steps_equal_adamw_in_plain_torch(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Any, clip_grad: float | None
) -> None:
    """Norm before clipping, clipping, decay and moments: AdamW fed with the same gradients."""
    spec = OptimizerSpec(lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2, clip_grad=clip_grad)
    engine = build(optimizer=spec)
    plain = AutoModelForCausalLM.from_pretrained(model_folder)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.2)
    for _ in range(3):
        gradients = kit.gradients(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        for name, parameter in plain.named_parameters():
            parameter.grad = gradients[name].clone()
        expected = torch.nn.utils.clip_grad_norm_(plain.parameters(), clip_grad or math.inf)
        optimizer.step()
        assert float(expected) == pytest.approx(engine.optimizer_step(), rel=1e-5)
    published = kit.weights(engine)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(parameter.detach(), published[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [0, 0.5, 1, 1, 1, 1, 1, 1]),
        ("linear", [0, 0.5, 1, 0.775, 0.55, 0.325, 0.1, 0.1]),
        ("cosine", [0, 0.5, 1, *(0.1 + 0.9 * (1 + math.cos(math.pi * step / 4)) / 2 for step in (1, 2, 3)), 0.1, 0.1]),
    ],
)
def test_learning_rate_follows_its_closed_form(build: Build, scheduler: Any, expected: list[float]) -> None:
    """Two steps of warm-up, four of decay to a tenth, then flat: what the *next* step will use."""
    spec = OptimizerSpec(lr=2.0, scheduler=scheduler, warmup_steps=2, total_steps=6, min_lr_ratio=0.1)
    engine = build(optimizer=spec)
    rates = [engine._optimization._optimizers[0]._optimizer.param_groups[0]["lr"]]
    for _ in expected[1:]:
        rates.append(engine.lr_scheduler_step())
        assert rates[-1] == engine._optimization._optimizers[0]._optimizer.param_groups[0]["lr"]
    assert [2.0 * factor for factor in expected] == pytest.approx(rates)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_step_with_a_norm_that_is_not_finite_is_skipped(kit: ModuleType, build: Build, rows: Rows, bad: float) -> None:
    """The norm says so, weights and moments stay, and training goes on."""
    skipping = OptimizerSpec(lr=1e-2, on_nonfinite="skip")
    engine, loss = build(optimizer=skipping), kit.PolicyLoss(rows)
    kit.train(engine, kit.make_batch(rows), loss)
    before = kit.weights(engine)
    _, norm = kit.train(engine, kit.make_batch(rows), lambda output, _: ((output.log_probs * bad).sum(), {}))
    assert not math.isfinite(norm)
    assert equal(before, kit.weights(engine))
    other = build(optimizer=skipping)
    kit.train(other, kit.make_batch(rows), loss, steps=2)
    kit.train(engine, kit.make_batch(rows), loss)
    assert equal(kit.weights(other), kit.weights(engine))


def test_one_seed_gives_one_engine(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Value head, adapter and dropout come from the seed, and from nothing else that draws in the process."""
    results = []
    for disturbance in (0, 1):
        torch.manual_seed(disturbance)
        random.seed(disturbance)
        np.random.seed(disturbance)
        engine = build(seed=5, lora=LoraSpec(rank=2, dropout=0.3), value_head=True, micro_batch_tokens=50)
        draws = torch.rand(1).item(), random.random(), np.random.rand()
        for _ in range(2):
            torch.rand(disturbance)
            kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        kit.gradients(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        results.append((draws, dict(engine.get_per_tensor_grad())))
        torch.manual_seed(disturbance)
        random.seed(disturbance)
        np.random.seed(disturbance)
        assert draws == (torch.rand(1).item(), random.random(), np.random.rand())
    assert equal(results[0][1], results[1][1])
    other = build(seed=6, lora=LoraSpec(rank=2, dropout=0.3), value_head=True, micro_batch_tokens=50)
    kit.train(other, kit.make_batch(rows), kit.PolicyLoss(rows), steps=2)
    assert not equal(results[0][1], kit.gradients(other, kit.make_batch(rows), kit.PolicyLoss(rows)))


def test_dropout_is_on_in_train_mode_only(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Two passes differ in train mode and agree in eval mode."""
    engine = build(lora=LoraSpec(rank=2, dropout=0.5))
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    seen = {}
    for mode in (engine.train_mode, engine.eval_mode):
        with mode():
            passes = [engine.forward_backward_batch(kit.make_batch(rows), None, True).log_probs for _ in range(2)]
        seen[mode.__name__] = torch.equal(passes[0].values(), passes[1].values())
    assert {"train_mode": False, "eval_mode": True} == seen


def test_adapter_trains_alone_and_can_be_switched_off(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Any
) -> None:
    """The base never moves, the switched-off model is the base, and gradients have the adapter's names only."""
    engine, plain = build(lora=LoraSpec(rank=4, alpha=8.0)), build(optimizer=None, role="reference")
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)

    def log_probs(of: Any) -> torch.Tensor:
        with of.eval_mode():
            return of.forward_backward_batch(batch, None, forward_only=True).log_probs.values().clone()

    with engine.disable_adapter():  # before anything was trained: the first gathering must not freeze the adapter
        log_probs(engine)
    _, norm = kit.train(engine, batch, loss, steps=3)
    assert norm > 0
    assert not torch.allclose(log_probs(plain), log_probs(engine), atol=1e-3)
    with engine.disable_adapter():
        torch.testing.assert_close(log_probs(plain), log_probs(engine), rtol=0, atol=1e-6)
    assert not torch.allclose(log_probs(plain), log_probs(engine), atol=1e-3)
    assert sorted(kit.weights(engine)) == sorted(kit.gradients(engine, batch, loss))
    base = AutoModelForCausalLM.from_pretrained(model_folder).state_dict()
    for name, parameter in engine._model.causal_lm.named_parameters():
        if "lora_" not in name:
            assert torch.equal(base[name.replace(".base_layer", "")], parameter.full_tensor()), name


def test_adapter_is_published_under_the_names_of_peft(kit: ModuleType, build: Build, rows: Rows) -> None:
    """PEFT's own names, whole tensors, and a config that JSON can hold."""
    engine = build(lora=LoraSpec(rank=4, target_modules=("q_proj", "down_proj")))
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    tensors, config = engine.get_per_tensor_param()
    language_model = engine._model.language_model
    assert isinstance(language_model, PeftModel)
    expected = {name: t.full_tensor().detach() for name, t in get_peft_model_state_dict(language_model).items()}
    assert equal(expected, dict(tensors))
    chosen = {name: config[name] for name in ("peft_type", "r", "lora_alpha", "target_modules")}
    assert {"peft_type": "LORA", "r": 4, "lora_alpha": 16.0, "target_modules": ["down_proj", "q_proj"]} == chosen
    assert config == json.loads(json.dumps(config))


def test_offloading_changes_nothing(kit: ModuleType, build: Build, rows: Rows) -> None:
    """To the CPU and back between pass and step: the bits of an engine that stayed."""
    stayed, moved = build(), build()
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    for engine in (stayed, moved):
        kit.train(engine, batch, loss)
        kit.gradients(engine, batch, loss)
        if engine is moved:
            engine.to("cpu")
            engine.to("cpu", model=True, optimizer=False, grad=False)
        engine.optimizer_step()
    assert equal(kit.weights(stayed), kit.weights(moved))


@pytest.mark.needs("cuda")
@pytest.mark.parametrize("parts", [(True, True, True), (True, False, False), (False, True, True)])
def test_offloading_from_a_gpu_changes_nothing(
    kit: ModuleType, build: Build, rows: Rows, parts: tuple[bool, bool, bool]
) -> None:
    """As above, where something moves; and the GPU agrees with the CPU."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    expected = kit.gradients(build(), batch, loss)
    stayed, moved = build(device="cuda"), build(device="cuda")
    for engine in (stayed, moved):
        actual = kit.gradients(engine, batch, loss)
        for name, gradient in expected.items():
            torch.testing.assert_close(gradient, actual[name].cpu(), rtol=1e-4, atol=1e-6)
        engine.optimizer_step()
        kit.gradients(engine, batch, loss)
        if engine is moved:
            engine.to("cpu", *parts)
            engine.to("cuda", *parts)
        engine.optimizer_step()
    assert equal(kit.weights(stayed), kit.weights(moved))


def test_engines_of_one_process_share_a_group(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Actor, reference and critic side by side; the group goes with the last of them."""
    import torch.distributed as dist

    actor, other = build(), build(role="critic", value_head=True)
    assert dist.is_initialized()
    other.close()
    other.close()
    kit.train(actor, kit.make_batch(rows), kit.PolicyLoss(rows))
    actor.close()
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    build().close()
    assert dist.is_initialized()  # not ours, so it stays
    dist.destroy_process_group()


@pytest.mark.parametrize("accumulation", ["sharded", "unsharded"])
def test_a_failed_pass_leaves_nothing_behind(kit: ModuleType, build: Build, rows: Rows, accumulation: Any) -> None:
    """A loss that raises in its second micro-batch: the next pass is as if it had not been, or is refused."""
    batch, loss, calls = kit.make_batch(rows), kit.PolicyLoss(rows), []
    config = Config(wrap="layers", gradient_accumulation=accumulation)
    engine = build(config, micro_batch_tokens=40)

    def failing(output: Any, data: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("broken loss")
        return loss(output, data)

    with engine.train_mode(), pytest.raises(ValueError, match="broken loss"):
        engine.forward_backward_batch(batch, failing)
    expected = kit.gradients(build(config, micro_batch_tokens=40), batch, loss)
    if accumulation == "sharded":
        assert equal(expected, kit.gradients(engine, batch, loss))
    else:
        with pytest.raises(EngineError) as caught:
            kit.gradients(engine, batch, loss)
        assert "engine.state" == caught.value.code
