"""What leaves the engine: published tensors, native checkpoints, Hugging Face folders."""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield_engine_fsdp.config import Config

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return sorted(one) == sorted(other) and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_published_tensors_are_those_of_the_folder(
    kit: ModuleType, build: Build, model_folder: Path, untied_folder: Path, tied: bool, dtype: str
) -> None:
    """Names, shapes and bits of the library's own state dict; what is tied comes once; value heads stay."""
    folder = model_folder if tied else untied_folder
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    expected = {name: tensor for name, tensor in plain.state_dict().items() if not (tied and name == "lm_head.weight")}
    engine = build(Config(wrap="layers"), folder=folder, dtype=dtype, value_head=True)
    tensors, adapter = engine.get_per_tensor_param()
    assert adapter is None
    assert equal(expected, dict(tensors))


def test_published_tensors_are_copies(kit: ModuleType, build: Build, rows: Rows) -> None:
    """A receiver that keeps them does not see the next step."""
    engine = build()
    before = kit.weights(engine)
    kept = {name: tensor.clone() for name, tensor in before.items()}
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    assert equal(kept, before)
    assert not equal(kept, kit.weights(engine))


def test_a_file_that_cannot_grow_is_an_error_that_names_folder_and_rank(
    build: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system's limit stands for a full disk."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # a cache that is cut off would stay so
    engine, limits = build(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(EngineError) as caught:
            engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert ("engine.failed", f"{tmp_path / 'native'}, rank 0") == (caught.value.code, caught.value.where)


@pytest.mark.parametrize("kind", ["model", "critic", "adapter", "fresh"])
def test_save_load_step_is_bitwise_step(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, kind: str) -> None:
    """Weights, moments, schedule and dropout go on where they were; also before the first step."""
    options: dict[str, Any] = {
        "model": {},
        "critic": {"role": "critic", "value_head": True},
        "adapter": {"lora": LoraSpec(rank=2, dropout=0.3), "value_head": True},
        "fresh": {},
    }[kind]
    spec = OptimizerSpec(lr=1e-2, scheduler="cosine", warmup_steps=1, total_steps=9)
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    engine = build(seed=1, optimizer=spec, **options)
    if kind != "fresh":
        kit.train(engine, batch, loss, steps=3)
    result = engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    assert {"engine.json", "random_0.json"} < set(result.files)
    kit.train(engine, batch, loss, steps=2)
    other = build(seed=2, optimizer=spec, **options)
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    kit.train(other, batch, loss, steps=2)
    names = [name for name, p in engine._model.named_parameters() if p.requires_grad]
    trained = [dict(one._model.named_parameters()) for one in (engine, other)]
    assert all(torch.equal(trained[0][name].full_tensor(), trained[1][name].full_tensor()) for name in names)
    assert engine.lr_scheduler_step() == other.lr_scheduler_step()


def test_model_only_leaves_optimizer_and_schedule(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path) -> None:
    """Weights come, the schedule stays; an engine without an optimizer can load, too."""
    spec = OptimizerSpec(lr=1.0, scheduler="linear", total_steps=10)
    engine = build(optimizer=spec)
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows), steps=2)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    other, frozen = build(optimizer=spec), build(optimizer=None, role="reference")
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native"), model_only=True))
    frozen.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    assert equal(kit.weights(engine), kit.weights(other))
    assert equal(kit.weights(engine), kit.weights(frozen))
    assert 0.9 == pytest.approx(other.lr_scheduler_step())


def test_hugging_face_folder_loads_and_agrees(kit: ModuleType, build: Build, rows: Rows, tmp_path: Path) -> None:
    """Weights and config by ``from_pretrained``, tokenizer files beside them, the value head on its own."""
    engine = build(value_head=True)
    source = Path(engine.context.model.path)
    (source / "tokenizer_config.json").write_text('{"model_max_length": 7}')
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
    result = engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "hf"), format="huggingface"))
    assert {"config.json", "model.safetensors", "tokenizer_config.json", "value_head.safetensors"} <= set(result.files)
    assert ["Qwen3ForCausalLM"] == json.loads((tmp_path / "hf/config.json").read_text())["architectures"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    again = build(folder=tmp_path / "hf", optimizer=None)
    assert equal(kit.weights(engine), kit.weights(again))
    row = rows[0]
    with engine.eval_mode():
        actual = engine.forward_backward_batch(kit.make_batch([row]), None, forward_only=True).log_probs.values()
    tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)[len(row["prompt_ids"]) - 1 : -1]
    expected = log_probs.gather(1, torch.tensor(row["response_ids"])[:, None]).squeeze(1)
    torch.testing.assert_close(expected, actual, rtol=0, atol=1e-5)
    assert {"weight", "bias"} == set(load_file(tmp_path / "hf/value_head.safetensors"))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft, not us
def test_adapter_folder_loads_with_peft(
    kit: ModuleType, build: Build, rows: Rows, model_folder: Path, tmp_path: Path
) -> None:
    """The base from its folder and the adapter from ours give the engine's log-probabilities."""
    engine = build(lora=LoraSpec(rank=4))
    kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows), steps=2)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "peft"), format="huggingface"))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model_folder), tmp_path / "peft")
    row = rows[3]
    with engine.eval_mode():
        actual = engine.forward_backward_batch(kit.make_batch([row]), None, forward_only=True).log_probs.values()
    tokens = torch.tensor([row["prompt_ids"] + row["response_ids"]])
    with torch.no_grad():
        log_probs = model(tokens).logits[0].log_softmax(-1)[len(row["prompt_ids"]) - 1 : -1]
    expected = log_probs.gather(1, torch.tensor(row["response_ids"])[:, None]).squeeze(1)
    torch.testing.assert_close(expected, actual, rtol=0, atol=1e-5)


def test_checkpoints_that_cannot_be_used_are_refused(
    kit: ModuleType, build: Build, untied_folder: Path, tmp_path: Path
) -> None:
    """Absent, unfinished, of another model; and a folder that is not empty."""
    engine, other = build(), build(folder=untied_folder)
    with pytest.raises(EngineError) as caught:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "absent")))
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    with pytest.raises(EngineError) as caught:
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native")))
    assert "engine.failed" == caught.value.code
    with pytest.raises(EngineError) as caught:
        other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    (tmp_path / "native/engine.json").unlink()
    with pytest.raises(EngineError) as caught:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    assert "engine.failed" == caught.value.code
