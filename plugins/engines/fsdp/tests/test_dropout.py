"""Training passes have the numbers of inference passes, unless ``ModelSpec.dropout`` asks for dropout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from jackfield.abc.engine import LoraSpec, SaveCheckpointRequest
from jackfield_engine_fsdp.config import Config

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]
EAGER = Config(attention="eager")  # some of the models have no other attention

_SIZES = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
_GROUPED = {**_LAYERS, "num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}

#: Every one draws random numbers in training: by layers, by numbers, by skipped layers, by noise, by sampled experts.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "gpt2": {**_GPT, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "gptj": {**_GPT, "rotary_dim": 4, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "gpt_neo": {
        "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": 64,
        "attention_types": [[["global", "local"], 1]], "attention_dropout": 0.1, "embed_dropout": 0.1,
        "resid_dropout": 0.1,
    },
    "gpt_bigcode": {**_GPT, "attn_pdrop": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "opt": {
        **_LAYERS, "ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.1, "attention_dropout": 0.1, "layerdrop": 0.5,
    },
    "biogpt": {
        **_LAYERS, "intermediate_size": 48, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "activation_dropout": 0.1, "layerdrop": 0.5,
    },
    "seed_oss": {**_GROUPED, "attention_dropout": 0.1, "residual_dropout": 0.1},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox": {**_LAYERS, "intermediate_size": 48, "attention_dropout": 0.1, "hidden_dropout": 0.1},
    "falcon": {**_LAYERS, "attention_dropout": 0.1, "hidden_dropout": 0.1, "alibi": False},
    "phi": {**_LAYERS, "intermediate_size": 48, "attention_dropout": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "phi3": {**_GROUPED, "attention_dropout": 0.1, "embd_pdrop": 0.1, "resid_pdrop": 0.1},
    "qwen3": {**_GROUPED, "attention_dropout": 0.1},
    "mixtral": {**_GROUPED, "num_local_experts": 4, "attention_dropout": 0.1, "router_jitter_noise": 0.1},
    "phimoe": {
        **_GROUPED, "num_local_experts": 4, "attention_dropout": 0.1, "hidden_dropout": 0.1,
        "router_jitter_noise": 0.1, "input_jitter_noise": 0.1,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``folder_of(architecture)``: a tiny model with weights wide enough for each of them to show."""
    root = tmp_path_factory.mktemp("architectures")

    def folder_of(name: str) -> Path:
        folder = root / name
        if not folder.exists():
            config = AutoConfig.for_model(name, **_SIZES, **ARCHITECTURES[name])
            with torch.random.fork_rng():
                torch.manual_seed(11)
                model = AutoModelForCausalLM.from_config(config)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
            model.save_pretrained(folder)
        return folder

    return folder_of


def passes(engine: Any, kit: ModuleType, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of an inference pass and of a training pass with its backward pass, ``[tokens]`` each."""
    batch = kit.make_batch(rows)
    with engine.eval_mode():
        inference = engine.forward_backward_batch(batch, None, forward_only=True)
    with engine.train_mode():
        training = engine.forward_backward_batch(batch, kit.PolicyLoss(rows))
    return inference.log_probs.values(), training.log_probs.values()


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_training_pass_is_an_inference_pass(
    kit: ModuleType, build: Build, rows: Rows, folder_of: Callable[[str], Path], name: str, checkpointing: bool
) -> None:
    """The log-probabilities of both passes are equal, whatever dropout the model's config has."""
    engine = build(EAGER, folder=folder_of(name), micro_batch_tokens=60, gradient_checkpointing=checkpointing)
    inference, training = passes(engine, kit, rows)
    torch.testing.assert_close(training, inference, rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_dropout_is_what_the_setting_says(
    kit: ModuleType, build: Build, rows: Rows, folder_of: Callable[[str], Path], name: str
) -> None:
    """A probability changes training passes, more so a larger one, and inference passes never."""
    expected, _ = passes(build(EAGER, folder=folder_of(name)), kit, rows)
    distances = []
    for probability in (0.02, 0.5):
        inference, training = passes(build(EAGER, folder=folder_of(name), dropout=probability), kit, rows)
        assert torch.equal(expected, inference)
        distances.append(float((training - inference).abs().mean()))
    assert 0 < distances[0] < distances[1]


@pytest.mark.parametrize("name", ["opt", "mixtral"])
def test_layers_are_never_skipped_and_routers_never_noisy(
    kit: ModuleType, build: Build, rows: Rows, folder_of: Callable[[str], Path], name: str
) -> None:
    """With a dropout so small that it drops nothing, what is left of ``layerdrop`` and jitter would show."""
    engine = build(folder=folder_of(name), dropout=1e-12, gradient_checkpointing=True)
    inference, training = passes(engine, kit, rows)
    torch.testing.assert_close(training, inference, rtol=0, atol=2e-6)


def test_an_adapter_has_a_dropout_of_its_own(
    kit: ModuleType, build: Build, rows: Rows, folder_of: Callable[[str], Path]
) -> None:
    """``LoraSpec.dropout`` is on without ``ModelSpec.dropout``, and the other way round."""
    seen = {}
    for lora, dropout in ((0.0, 0.0), (0.5, 0.0), (0.0, 0.5)):
        engine = build(folder=folder_of("qwen3"), lora=LoraSpec(rank=2, dropout=lora), dropout=dropout)
        kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        inference, training = passes(engine, kit, rows)
        seen[lora, dropout] = float((training - inference).abs().max()) < 2e-6
    assert {(0.0, 0.0): True, (0.5, 0.0): False, (0.0, 0.5): False} == seen


@pytest.mark.parametrize("role", ["critic", "reference"])
def test_other_roles_have_none_either(
    kit: ModuleType, build: Build, rows: Rows, folder_of: Callable[[str], Path], role: str
) -> None:
    """A critic's values in training are its values in inference."""
    engine = build(Config(wrap="layers"), folder=folder_of("gpt2"), role=role, value_head=True)
    batch = kit.make_batch(rows)
    with engine.eval_mode():
        inference = engine.forward_backward_batch(batch, None, forward_only=True)
    with engine.train_mode():
        training = engine.forward_backward_batch(batch, kit.PolicyLoss(rows), forward_only=True)
    torch.testing.assert_close(inference.values.values(), training.values.values(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("name", ["gpt2", "opt", "mixtral"])
def test_a_saved_model_names_the_dropout_that_it_came_with(
    build: Build, folder_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    """What is exported may be trained elsewhere."""
    engine = build(folder=folder_of(name), dropout=0.3)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "out"), format="huggingface"))
    expected, saved = (json.loads((each / "config.json").read_text()) for each in (folder_of(name), tmp_path / "out"))
    names = [each for each in expected if "drop" in each or "jitter" in each]
    assert names
    assert {each: expected[each] for each in names} == {each: saved[each] for each in names}
