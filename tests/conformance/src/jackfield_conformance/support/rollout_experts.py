"""For the suites of rollout servers and engines: a tiny mixture of experts, and what its routers choose."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from jackfield_conformance.support.expecting import temporary_root
from jackfield_conformance.support.rollout_model import END, VOCABULARY

LAYERS, EXPERTS_PER_TOKEN = 2, 2


@functools.cache
def _model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=32,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        norm_topk_prob=True,
        max_position_embeddings=128,
        initializer_range=0.25,
        eos_token_id=END,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3MoeForCausalLM(config)
    return model.eval().requires_grad_(False)


@functools.cache
def mixture_folder() -> str:
    """Write a Qwen3-MoE in float32, once per process."""
    folder = str(temporary_root() / "rollout-model-experts")
    _model().save_pretrained(folder)
    return folder


def expected_experts(ids: Sequence[int]) -> torch.Tensor:
    """Return the experts of tokens by one pass of the library, int64 ``[tokens, layers, experts]``, in order."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: found.append(output[2]))
        for layer in _model().model.layers
    ]
    try:
        _model()(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found, dim=1).sort(-1).values


def log_probs_with(prompt: Sequence[int], response: Sequence[int], experts: torch.Tensor | None) -> torch.Tensor:
    """Return log-probabilities of a response, float32 ``[response]``, by layers that are computed here.

    ``experts`` are int64 ``[tokens, layers, experts]`` of all tokens but the last; None: those of the routers.
    """
    layers = _model().model.layers
    for number, layer in enumerate(layers):
        chosen = None if experts is None else experts[:, number]
        layer.mlp.forward = functools.partial(_mixed, layer.mlp, chosen)
    try:
        ids = torch.tensor([[*prompt, *response][:-1]])
        logits = _model()(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
    finally:
        for layer in layers:
            del layer.mlp.forward
    found: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(list(response))[:, None]).squeeze(1)
    return found


def _mixed(layer: Any, chosen: torch.Tensor | None, hidden: torch.Tensor) -> torch.Tensor:
    """Compute a layer with experts for ``hidden`` ``[1, tokens, H]``, one token and expert at a time."""
    tokens = hidden[0]
    probabilities = (tokens @ layer.gate.weight.T).softmax(-1)
    chosen = probabilities.topk(EXPERTS_PER_TOKEN).indices if chosen is None else chosen
    weights = probabilities.gather(1, chosen)
    weights = weights / weights.sum(-1, keepdim=True)
    result = torch.zeros_like(tokens)
    for place, token in enumerate(tokens):
        for weight, expert in zip(weights[place], chosen[place].tolist(), strict=True):
            gate, up = (layer.experts.gate_up_proj[expert] @ token).chunk(2)
            result[place] += weight * (layer.experts.down_proj[expert] @ (torch.nn.functional.silu(gate) * up))
    return result[None]


def balance_of(ids: Sequence[int]) -> float:
    """Return the load-balancing loss of one row by its definition: the mean over layers of E x sum(share x mean)."""
    layers, losses = _model().model.layers, []
    logits: list[torch.Tensor] = []
    hooks = [layer.mlp.gate.register_forward_hook(lambda _, __, output: logits.append(output[0])) for layer in layers]
    try:
        _model()(input_ids=torch.tensor([list(ids)]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    for number, each in enumerate(logits):
        chosen = expected_experts(ids)[:, number].flatten().bincount(minlength=each.shape[-1]).double()
        losses.append(float((chosen / chosen.sum() * each.double().softmax(-1).mean(0)).sum()) * each.shape[-1])
    return sum(losses) / len(losses)
