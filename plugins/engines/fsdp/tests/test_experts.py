"""Mixtures of experts: the experts that generated a token are trained, and the load is balanced, in every split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM

from jackfield.errors import EngineError
from jackfield.sdk.arrays import pack
from jackfield.sdk.jagged import jagged
from jackfield.sdk.jagged import rows as unpack
from jackfield_architectures import save_model

LAYERS, EXPERTS = 2, 4
VOCABULARY = 90

Rows = list[dict[str, Any]]
Build = Callable[..., Any]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("mixture")
    save_model("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def rows(kit: ModuleType) -> Rows:
    """Rows of several lengths; two have the same prompt."""
    made: Rows = kit.make_rows([(3, 5), (3, 4), (6, 9), (1, 7), (5, 1)], vocabulary=VOCABULARY)
    made[1]["prompt_ids"] = made[0]["prompt_ids"]
    return made


def ids_of(row: dict[str, Any]) -> list[int]:
    return [*row["prompt_ids"], *row["response_ids"]][:-1]


def other_experts(rows: Rows) -> list[np.ndarray[Any, Any]]:
    """Two experts per token that depend on the tokens up to it, and that no router would choose by itself."""
    found = []
    for row in rows:
        sums = np.cumsum(ids_of(row))
        first = np.stack([(sums + layer) % EXPERTS for layer in range(LAYERS)], axis=1)
        found.append(np.stack([first, (first + 1 + sums[:, None] % 3) % EXPERTS], axis=2).astype(np.int16))
    return found


def with_experts(batch: TensorDict, experts: list[Any]) -> TensorDict:
    contents = [pack({} if each is None else {"routed_experts": each}) for each in experts]
    batch["multi_modal_inputs"] = jagged([torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in contents])
    return batch


def library_log_probs(folder: Path, rows: Rows, experts: list[Any]) -> list[torch.Tensor]:
    """Log-probabilities of a model whose layers are computed here, expert by expert, with the given experts."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    place = {"row": 0}

    def mixed(number: int, layer: Any) -> Callable[..., torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            flat = hidden[0]
            weights = (flat @ layer.gate.weight.T).softmax(-1)
            chosen = experts[place["row"]]
            picked = weights.topk(2).indices if chosen is None else torch.from_numpy(chosen[:, number].astype(np.int64))
            weights = weights.gather(1, picked)
            if layer.gate.norm_topk_prob:
                weights = weights / weights.sum(-1, keepdim=True)
            out = torch.zeros_like(flat)
            for token in range(len(flat)):
                for choice, expert in enumerate(picked[token].tolist()):
                    gate, up = (layer.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
                    one = layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up)
                    out[token] += weights[token, choice] * one
            return out[None]

        return forward

    for number, layer in enumerate(model.model.layers):
        layer.mlp.forward = mixed(number, layer.mlp)
    found = []
    for number, row in enumerate(rows):
        place["row"] = number
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids_of(row)]), use_cache=False).logits[0]
        logits = logits[len(row["prompt_ids"]) - 1 :]
        found.append(logits.log_softmax(-1).gather(1, torch.tensor(row["response_ids"])[:, None]).squeeze(1))
    return found


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("micro_batch_tokens", [1, 16384])
def test_given_experts_are_trained(
    kit: ModuleType, build: Build, mixture: Path, rows: Rows, micro_batch_tokens: int, checkpointing: bool
) -> None:
    """Log-probabilities are those of the given experts; of one row nothing is known, so its routers choose."""
    experts: list[Any] = other_experts(rows)
    experts[3] = None
    options: dict[str, Any] = {"router_replay": True, "gradient_checkpointing": checkpointing}
    engine = build(folder=mixture, micro_batch_tokens=micro_batch_tokens, **options)
    batch = with_experts(kit.make_batch(rows), experts)
    with engine.train_mode():
        output = engine.forward_backward_batch(batch, kit.PolicyLoss(rows))
    expected = library_log_probs(mixture, rows, experts)
    for wanted, found in zip(expected, unpack(output.log_probs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    unused = library_log_probs(mixture, rows, [None] * len(rows))
    assert max(float((one - other).abs().max()) for one, other in zip(expected, unused, strict=True)) > 1e-3


def test_the_next_pass_without_experts_is_the_models_own(
    kit: ModuleType, build: Build, mixture: Path, rows: Rows
) -> None:
    engine = build(folder=mixture, router_replay=True)
    with engine.eval_mode():
        engine.forward_backward_batch(with_experts(kit.make_batch(rows), other_experts(rows)), None, forward_only=True)
        output = engine.forward_backward_batch(kit.make_batch(rows), None, forward_only=True)
    expected = library_log_probs(mixture, rows, [None] * len(rows))
    for wanted, found in zip(expected, unpack(output.log_probs), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)


def test_the_load_is_balanced_in_every_split(kit: ModuleType, build: Build, mixture: Path, rows: Rows) -> None:
    """The loss of a row is its own, so gradients do not depend on the micro-batches; each row counts once."""
    found = []
    for factor, micro_batch_tokens in ((0.0, 16384), (0.5, 16384), (0.5, 1)):
        engine = build(folder=mixture, micro_batch_tokens=micro_batch_tokens, router_aux_loss=factor)
        with engine.train_mode():
            output = engine.forward_backward_batch(kit.make_batch(rows), kit.PolicyLoss(rows))
        found.append((output, dict(engine.get_per_tensor_grad())))
        engine.close()
    plain, whole, split = found
    assert "router_aux_loss" not in plain[0].metrics
    balance = whole[0].metrics["router_aux_loss"]
    assert balance == pytest.approx(split[0].metrics["router_aux_loss"], rel=1e-5)
    assert whole[0].loss == pytest.approx(plain[0].loss + 0.5 * balance, rel=1e-5)
    assert 0.9 < balance < EXPERTS
    gate = next(name for name in whole[1] if name.endswith("mlp.gate.weight"))
    assert not torch.allclose(plain[1][gate], whole[1][gate], rtol=1e-3)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(split[1][name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("setting", [{"router_replay": True}, {"router_aux_loss": 0.1}], ids=["replay", "loss"])
def test_a_dense_model_is_refused(build: Build, setting: dict[str, Any]) -> None:
    with pytest.raises(EngineError) as caught:
        build(**setting)
    assert caught.value.code == "config.invalid-value"
    assert caught.value.where == f"model.{next(iter(setting))}"


def test_experts_that_do_not_fit_are_refused(kit: ModuleType, build: Build, mixture: Path, rows: Rows) -> None:
    engine = build(folder=mixture, router_replay=True)
    experts = other_experts(rows)
    experts[2] = experts[2][:-1]
    with engine.eval_mode(), pytest.raises(EngineError) as caught:
        engine.forward_backward_batch(with_experts(kit.make_batch(rows), experts), None, forward_only=True)
    assert caught.value.code == "engine.failed"
