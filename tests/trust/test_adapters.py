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


#: The layers whose merged weights differ from the base's.
LEARNT = {
    "qwen3_moe": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "gpt2": {"c_attn", "c_proj", "c_fc"},
    "qwen2_vl": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}


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
    adapted = PeftModel.from_pretrained(kind.from_pretrained(base), tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "by PEFT")
    plain, expected, found = (
        load_file(folder / "model.safetensors") for folder in (base, tmp_path / "by PEFT", merged)
    )
    assert plain.keys() == expected.keys() == found.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    changed = {name.split(".")[-2] for name, tensor in plain.items() if not torch.equal(tensor, found[name])}
    assert changed == LEARNT[architecture], "what the adapter has learnt"
    kind.from_pretrained(merged)


@pytest.mark.parametrize(
    ("setting", "value"), [("rank", "0"), ("rank", "-3"), ("alpha", "0"), ("dropout", "1.0"), ("dropout", "-0.1")]
)
def test_a_value_out_of_range_is_refused_by_its_own_name(
    setting: str, value: str, jackfield: CommandServer, quickstart_settings: Callable[..., list[str]]
) -> None:
    """Before a run."""
    options = quickstart_settings("lora", f"model.lora.{setting}={value}")
    refused = jackfield("config", "validate", *options)
    assert 1 == refused.code
    assert refused.error.startswith("[config.invalid-value] "), refused.error
    assert f"model.lora.{setting}" in refused.error
    assert "target_modules" not in refused.error


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
