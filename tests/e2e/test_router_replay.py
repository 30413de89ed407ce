"""A mixture of experts in a run: training uses the experts that generated each token."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

from jackfield_testing import refused

from .conftest import Run

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def mixture(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE with the quickstart's tokenizer, whose weights are large enough for sharp choices."""
    folder = tmp_path_factory.mktemp("mixture") / "model"
    shutil.copytree(made / "model", folder, ignore=shutil.ignore_patterns("*.safetensors"))
    dense = AutoConfig.from_pretrained(made / "model")
    config = Qwen3MoeConfig(
        vocab_size=dense.vocab_size,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        initializer_range=0.1,
        max_position_embeddings=dense.max_position_embeddings,
        eos_token_id=dense.eos_token_id,
        pad_token_id=dense.pad_token_id,
        bos_token_id=dense.bos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder


def test_replayed_experts_bring_training_closer_to_the_server(small_run: Run, mixture: Path) -> None:
    """The server computes in bfloat16, so that some of its routers choose other experts than the engine's."""
    distances = {}
    for replay in ("true", "false"):
        settings = [f"model.router_replay={replay}", "model.router_aux_loss=0.01", "weights.dtype=bfloat16"]
        settings += [
            "schedule.steps=2",
            "log_prob_check.every=1",
            "sampling.max_new_tokens=24",
            "sampling.ignore_eos=true",
        ]
        _, lines = small_run(f"replay-{replay}", f"model.path={mixture}", *settings)
        steps = [line for line in lines if "log_prob_check/rollout/mean" in line]
        distances[replay] = steps[0]["log_prob_check/rollout/mean"]
        assert all("router_aux_loss" in line for line in lines if "grad_norm" in line)
    assert distances["true"] < 0.8 * distances["false"], distances


def test_answers_from_data_have_no_experts(small_run: Run, mixture: Path) -> None:
    with refused("config.invalid-value", "model.router_replay"):
        small_run("offline", f"model.path={mixture}", "model.router_replay=true", file="warmup.yaml")
