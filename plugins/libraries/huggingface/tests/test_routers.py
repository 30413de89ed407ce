"""Experts of a mixture: read from a pass, replaced in a pass, and balanced."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from jackfield_huggingface.routers import Routers

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
IDS = torch.tensor([[3, 14, 15, 9, 26], [5, 35, 8, 9, 7]])


@pytest.fixture
def model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(1)
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **mixture)).eval()


def test_a_dense_model_has_no_routers() -> None:
    assert Routers.of(Qwen3ForCausalLM(Qwen3Config(**SIZES))) is None


def test_replaying_what_was_taken_changes_nothing(model: Qwen3MoeForCausalLM) -> None:
    routers = Routers.of(model)
    assert routers is not None
    plain = model(IDS, use_cache=False).logits
    taken = routers.taken()
    assert taken.shape == (10, 2, 2)
    assert taken.dtype == torch.int16
    routers.replay(taken)
    assert torch.equal(plain, model(IDS, use_cache=False).logits)


def test_replayed_experts_get_the_weights_of_the_model(model: Qwen3MoeForCausalLM) -> None:
    """A layer with given experts is their sum, weighted by the normalised probabilities."""
    routers = Routers.of(model)
    assert routers is not None
    chosen = torch.tensor([[3, 1], [0, 2], [1, 0], [2, 3], [0, 3], [1, 2], [3, 0], [2, 1], [0, 1], [3, 2]])
    routers.replay(torch.stack([chosen, chosen.flip(1)], dim=1))
    hidden = torch.randn(2, 5, 32)
    layer = model.model.layers[0].mlp
    found = layer(hidden).flatten(0, 1)
    flat = hidden.flatten(0, 1)
    weights = (flat @ layer.gate.weight.T).softmax(-1).gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    wanted = torch.zeros_like(flat)
    for token in range(10):
        for place, expert in enumerate(chosen[token].tolist()):
            gate, up = (layer.experts.gate_up_proj[expert] @ flat[token]).chunk(2)
            wanted[token] += weights[token, place] * (layer.experts.down_proj[expert] @ (F.silu(gate) * up))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_unknown_experts_are_chosen_by_the_router(model: Qwen3MoeForCausalLM) -> None:
    routers = Routers.of(model)
    assert routers is not None
    model(IDS, use_cache=False)
    own = routers.taken()
    other = (own + 1) % 4
    other[3:] = -1
    routers.replay(other)
    model(IDS, use_cache=False)
    assert torch.equal(other[:3, 0], routers.taken()[:3, 0])
    assert torch.equal(own[3:, 0], routers.taken()[3:, 0])
    routers.replay(None)
    model(IDS, use_cache=False)
    assert torch.equal(own, routers.taken())


def test_a_layer_that_is_computed_again_uses_the_same_experts(model: Qwen3MoeForCausalLM) -> None:
    routers = Routers.of(model)
    assert routers is not None
    model(IDS, use_cache=False)
    routers.replay((routers.taken() + 1) % 4)
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        model(IDS, use_cache=False).logits.square().sum().backward()
        gradients.append({name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-5, atol=1e-6)


def test_the_balance_of_a_row_does_not_depend_on_others(model: Qwen3MoeForCausalLM) -> None:
    """It equals a plain calculation, alone and beside another row with padding."""
    routers = Routers.of(model)
    assert routers is not None
    assert routers.has_logits
    wanted = []
    for row in IDS:
        with routers.keeping_logits():
            model(row[None], use_cache=False)
            (alone,) = routers.balance(torch.zeros(5, dtype=torch.int64), 1)
        losses = []
        for number in range(2):
            scores = routers._routers[number].scores
            assert scores is not None
            probability = scores.softmax(-1).mean(0)
            share = F.one_hot(routers.taken()[:, number].long(), 4).sum((0, 1)) / 10
            losses.append(4 * (share * probability).sum())
        torch.testing.assert_close(alone, torch.stack(losses).mean(), rtol=1e-5, atol=1e-6)
        wanted.append(alone)
    padded = torch.cat([IDS, torch.zeros(2, 1, dtype=torch.int64)], dim=1)
    rows = torch.tensor([0, 0, 0, 0, 0, -1, 1, 1, 1, 1, 1, -1])
    with routers.keeping_logits():
        model(padded, use_cache=False)
        together = routers.balance(rows, 2)
    torch.testing.assert_close(together, torch.stack(wanted), rtol=1e-6, atol=1e-6)
    together.sum().backward()
    assert float(model.model.layers[0].mlp.gate.weight.grad.abs().sum()) > 0


def test_an_even_load_has_the_balance_of_one() -> None:
    torch.manual_seed(2)
    mixture = {"num_local_experts": 4, "num_experts_per_tok": 4}
    model = GptOssForCausalLM(GptOssConfig(**SIZES, **mixture)).eval()
    routers = Routers.of(model)
    assert routers is not None
    with routers.keeping_logits():
        model(IDS, use_cache=False)
        found = routers.balance(torch.arange(2).repeat_interleave(5), 2)
    torch.testing.assert_close(found, torch.ones(2), rtol=1e-5, atol=1e-5)
