"""A Qwen3 written out in float64, row by row without padding: what the engine's numbers are compared with.

Written from the architecture's definition: RMS norms, rotary embeddings (half-split), grouped attention with normed
queries and keys, SwiGLU. T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

HEADS, KEY_HEADS, HEAD, EPS, THETA = 4, 2, 8, 1e-6, 10000.0


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's weights as float64 leaves."""
    tensors = load_file(folder / "model.safetensors")
    return {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


def _rotate(x: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of ``[heads, T, HEAD]``."""
    frequencies = THETA ** (-torch.arange(0, HEAD, 2, dtype=torch.float64) / HEAD)
    angles = torch.arange(x.shape[1], dtype=torch.float64).unsqueeze(1) * frequencies
    first, second = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat(
        [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], dim=-1
    )


def _attention(weights: dict[str, torch.Tensor], prefix: str, x: torch.Tensor) -> torch.Tensor:
    def heads(name: str, count: int) -> torch.Tensor:
        return (x @ weights[f"{prefix}.{name}_proj.weight"].T).view(len(x), count, HEAD).transpose(0, 1)

    queries = _rotate(_norm(heads("q", HEADS), weights[f"{prefix}.q_norm.weight"]))
    keys = _rotate(_norm(heads("k", KEY_HEADS), weights[f"{prefix}.k_norm.weight"]))
    keys = keys.repeat_interleave(HEADS // KEY_HEADS, dim=0)
    values = heads("v", KEY_HEADS).repeat_interleave(HEADS // KEY_HEADS, dim=0)
    scores = queries @ keys.transpose(1, 2) / HEAD**0.5
    scores = scores + torch.full_like(scores, -torch.inf).triu(1)
    mixed = (scores.softmax(-1) @ values).transpose(0, 1).reshape(len(x), HEADS * HEAD)
    return mixed @ weights[f"{prefix}.o_proj.weight"].T


def hidden_states(weights: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The last hidden states ``[T, H]`` of one row."""
    x = weights["model.embed_tokens.weight"][torch.tensor(tokens)]
    layer = 0
    while (prefix := f"model.layers.{layer}") + ".input_layernorm.weight" in weights:
        x = x + _attention(weights, f"{prefix}.self_attn", _norm(x, weights[f"{prefix}.input_layernorm.weight"]))
        y = _norm(x, weights[f"{prefix}.post_attention_layernorm.weight"])
        gate, up = (y @ weights[f"{prefix}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{prefix}.mlp.down_proj.weight"].T
        layer += 1
    return _norm(x, weights["model.norm.weight"])


def token_results(
    weights: dict[str, torch.Tensor], row: dict[str, list[Any]], temperature: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where R response tokens are predicted: log-probabilities ``[R]``, entropies ``[R]``, hidden states ``[R, H]``."""
    prompt, response = row["prompt_ids"], row["response_ids"]
    hidden = hidden_states(weights, prompt + response)[len(prompt) - 1 : len(prompt) - 1 + len(response)]
    head = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    all_log_probs = (hidden @ head.T / temperature).log_softmax(-1)
    chosen = all_log_probs[torch.arange(len(response)), torch.tensor(response, dtype=torch.int64)]
    return chosen, -(all_log_probs.exp() * all_log_probs).sum(-1), hidden


def loss_and_gradients(
    weights: dict[str, torch.Tensor],
    rows: list[dict[str, list[Any]]],
    *,
    entropy: float = 0.0,
    temperature: float = 1.0,
    head: tuple[torch.Tensor, torch.Tensor] | None = None,
    actor: bool = True,
) -> tuple[float, dict[str, torch.Tensor]]:
    """``PolicyLoss`` of all rows at once and its gradients, float64.

    Args:
        weights: from :func:`parameters`.
        rows: plain rows.
        entropy: coefficient of the entropy bonus.
        temperature: divides logits.
        head: weight ``[1, H]`` and bias ``[1]`` of a value head, float64 leaves.
        actor: False for a critic, whose log-probabilities are zeros.
    """
    total = torch.zeros((), dtype=torch.float64)
    for row in rows:
        log_probs, entropies, hidden = token_results(weights, row, temperature)
        old, advantages, mask = (
            torch.tensor(row[name], dtype=torch.float32).double()
            for name in ("old_log_probs", "advantages", "response_mask")
        )
        terms = -((log_probs if actor else torch.zeros_like(old)) - old).clamp(-20, 20).exp() * advantages
        terms = terms - entropy * entropies
        if head is not None:
            terms = terms + ((hidden @ head[0].T + head[1]).squeeze(-1) - advantages) ** 2
        total = total + (terms * mask).sum()
    loss = total / sum(sum(row["response_mask"]) for row in rows)
    leaves = dict(weights)
    if head is not None:
        leaves |= {"value_head.weight": head[0], "value_head.bias": head[1]}
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return float(loss.detach()), {name: grad for name, grad in zip(leaves, found, strict=True) if grad is not None}


def relative_error(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return float((actual.double() - expected).norm() / expected.norm().clamp_min(1e-30))
