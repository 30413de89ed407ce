"""Decode passes without the library's forward: the same numbers, for the models that are known."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateResult, RolloutContext
from jackfield_rollout_transformers.config import Config
from jackfield_rollout_transformers.direct import supports
from jackfield_rollout_transformers.model import load_model

PROMPTS = [(5, 6, 7), (9,), tuple(range(2, 21))]


def save(name: str, folder: Path, **changes: Any) -> str:
    """A random model of a kind, with biases where its kind has them and an output layer of its own."""
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False,
             "max_position_embeddings": 64, "eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0}  # fmt: skip
    torch.manual_seed(4)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if parameter.ndim == 1 else 0.0))
    model.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_log_probs_are_those_of_a_forward_pass(serve: Any, make_request: Any, tmp_path: Path, name: str) -> None:
    """Prompts of different lengths together, against one pass over each whole text in float64."""
    path = save(name, tmp_path, **({"sliding_window": None} if name == "mistral" else {}))
    assert supports(load_model(Config(), RolloutContext(model=ModelSpec(path=path))))

    async def main() -> list[GenerateResult]:
        async with serve(path=path) as server:
            requests = [make_request(n, each, max_new_tokens=12, ignore_eos=True) for n, each in enumerate(PROMPTS)]
            return await asyncio.gather(*(server.generate(request) for request in requests))

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    for prompt, result in zip(PROMPTS, asyncio.run(main()), strict=True):
        ids = torch.tensor([[*prompt, *result.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(result.log_probs, dtype=torch.float64), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "settings"), [("gemma", {}), ("llama", {"hidden_act": "gelu"})])
def test_other_models_use_the_librarys_forward(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    path = save(name, tmp_path, **settings)
    assert not supports(load_model(Config(), RolloutContext(model=ModelSpec(path=path))))
    assert not supports(load_model(Config(attention="eager"), RolloutContext(model=ModelSpec(path=path))))
