"""LoRA on every architecture: it works, or it is refused before anything starts; and what is exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from jackfield_architectures import save_model
from jackfield_commands import CommandServer

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.needs("module:peft"),
    pytest.mark.needs("module:jackfield_engine_fsdp"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # in peft
]

LORA = (
    "model.lora.rank=4",
    "optimizer.lr=0.01",
    "algorithm.entropy_coefficient=0.5",
    "checkpoint.every=2",
    "schedule.steps=2",
)


@pytest.fixture
def model_of(made: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A tiny model of an architecture, with the quickstart's tokenizer."""

    def make(architecture: str) -> Path:
        folder = tmp_path / architecture
        save_model(architecture, folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            if (made / "model" / name).is_file():
                shutil.copy(made / "model" / name, folder / name)
        return folder

    return make


@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt2", "qwen2_vl"])
def test_the_default_targets_are_trained_published_and_merged(
    architecture: str,
    model_of: Callable[[str], Path],
    jackfield: CommandServer,
    quickstart_settings: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    """A run with the default target_modules, from a relative path, ends well; the exported adapter names its base by
    an absolute path, and the merged model is base and adapter."""
    from peft import PeftModel

    base = model_of(architecture)
    settings = quickstart_settings("lora", *LORA, f"model.path={base.name}")
    done = jackfield("run", *settings, folder=tmp_path)
    assert 0 == done.code, done.error
    run = tmp_path / "lora"
    for out, options in (("adapter", ()), ("merged", ("--merge",))):
        exported = jackfield("checkpoint", "export", str(run), str(tmp_path / out), *options, folder=tmp_path)
        assert 0 == exported.code, exported.error
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert str(base.resolve()) == config["base_model_name_or_path"]
    merged = tmp_path / "merged"
    assert not list(merged.glob("adapter_*"))
    assert (base / "tokenizer.json").read_bytes() == (merged / "tokenizer.json").read_bytes()
    shapes = {name: tensor.shape for name, tensor in load_file(base / "model.safetensors").items()}
    assert shapes == {name: tensor.shape for name, tensor in load_file(merged / "model.safetensors").items()}
    from transformers import AutoModelForImageTextToText

    kind = AutoModelForImageTextToText if architecture == "qwen2_vl" else AutoModelForCausalLM
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    with torch.no_grad():
        plain = kind.from_pretrained(base).eval()(input_ids=ids).logits
        expected = PeftModel.from_pretrained(kind.from_pretrained(base), tmp_path / "adapter").eval()(input_ids=ids)
        found = kind.from_pretrained(merged).eval()(input_ids=ids).logits
    torch.testing.assert_close(found, expected.logits, rtol=0, atol=1e-4)
    assert not torch.allclose(found, plain, rtol=0, atol=1e-3), "the adapter has learnt nothing"


def test_experts_are_refused_before_anything_starts(
    model_of: Callable[[str], Path],
    jackfield: CommandServer,
    quickstart_settings: Callable[..., list[str]],
    tmp_path: Path,
) -> None:
    settings = quickstart_settings(
        "refused", *LORA, f"model.path={model_of('qwen3_moe')}", "model.lora.target_modules=[gate_proj, up_proj]"
    )
    refused = jackfield("run", *settings)
    assert 0 != refused.code
    assert "config.invalid-value" in refused.error
    assert "k_proj, o_proj, q_proj, v_proj" in refused.error
    metrics = tmp_path / "refused" / "metrics.jsonl"
    assert not metrics.is_file() or not metrics.read_text()


def test_without_an_adapter_there_is_nothing_to_merge(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = jackfield("run", *quickstart_settings("plain", "schedule.steps=1", "checkpoint.every=1"))
    assert 0 == done.code, done.error
    refused = jackfield("checkpoint", "export", str(tmp_path / "plain"), str(tmp_path / "out"), "--merge")
    assert 0 != refused.code
    assert "run.no-adapter" in refused.error
    assert not (tmp_path / "out").exists()
