"""Every mistake of a caller has its error, with the code that says which."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import import_module, resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from jackfield.abc.engine import BaseEngine, EngineContext, EngineLayout, LoraSpec, ModelSpec, OptimizerSpec
from jackfield.errors import ConfigError, EngineError
from jackfield.sdk import structure
from jackfield_engine_fsdp.config import Config
from jackfield_engine_fsdp.engine import FSDPEngine
from jackfield_engine_fsdp.process_group import device_of

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


def refuse(code: str, action: Callable[[], Any]) -> EngineError:
    with pytest.raises(EngineError) as caught:
        action()
    assert code == caught.value.code
    return caught.value


def test_folders_without_a_model(build: Build, model_folder: Path, tmp_path: Path) -> None:
    """Missing, empty, and with weights missing from it: each before a process group is made."""
    refuse("engine.model", lambda: build(folder=tmp_path / "absent"))
    refuse("engine.model", lambda: build(folder=tmp_path))
    (tmp_path / "config.json").write_text("{}")
    refuse("engine.model", lambda: build(folder=tmp_path))
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    refuse("engine.model", lambda: build(folder=tmp_path))
    from safetensors.torch import load_file, save_file

    tensors = load_file(model_folder / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    error = refuse("engine.model", lambda: build(folder=tmp_path))
    assert "model.norm.weight" in str(error)
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float8"},
        {"temperature": 0.0},
        {"micro_batch_tokens": 0},
        {"role": "critic"},
        {"world_size": 2},
        {"optimizer": OptimizerSpec(scheduler="linear")},
        {"lora": LoraSpec(target_modules=("no_such_layer",))},
    ],
    ids=str,
)
def test_contexts_that_cannot_work(build: Build, options: dict[str, Any]) -> None:
    """What is wrong is named before anything trains on it, and no group is left behind."""
    refuse("config.invalid-value", lambda: build(**options))
    assert not torch.distributed.is_initialized()


def test_use_in_the_wrong_state(kit: ModuleType, build: Build, rows: Rows, model_folder: Path) -> None:
    """Before initialize, outside of a mode, backward in eval mode, twice initialized, after close, no optimizer."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    raw = FSDPEngine(Config(), EngineContext(role="actor", model=ModelSpec(path=str(model_folder))))
    for action in (raw.optimizer_step, raw.get_per_tensor_param, raw.lr_scheduler_step, lambda: raw.layout):
        refuse("engine.state", action)
    refuse("engine.state", lambda: raw.forward_backward_batch(batch, loss))
    engine, frozen = build(), build(optimizer=None)
    refuse("engine.state", engine.initialize)
    refuse("engine.state", lambda: engine.forward_backward_batch(batch, loss))
    with engine.eval_mode():
        refuse("engine.state", lambda: engine.forward_backward_batch(batch, loss))
    with engine.train_mode():
        refuse("engine.failed", lambda: engine.forward_backward_batch(batch, None))
    refuse("engine.state", lambda: engine.forward_backward_batch(batch, None, forward_only=True))
    with frozen.train_mode():
        refuse("engine.state", lambda: frozen.forward_backward_batch(batch, loss))
    refuse("engine.state", frozen.optimizer_step)
    engine.close()
    refuse("engine.state", engine.optimizer_zero_grad)


def test_batches_that_cannot_be_read(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Token ids out of the vocabulary, no tokens, dense tokens, a response to nothing."""
    engine = build()
    vocabulary = kit.make_batch([rows[0] | {"prompt_ids": [61]}])
    missing = kit.make_batch(rows).exclude("response_ids")
    dense = kit.make_batch(rows)
    dense["prompt_ids"] = torch.zeros(len(rows), 3, dtype=torch.int64)
    promptless = kit.make_batch([rows[0] | {"prompt_ids": []}])
    with engine.eval_mode():
        for code, batch in (
            ("data.vocabulary", vocabulary),
            ("engine.failed", missing),
            ("engine.failed", dense),
            ("engine.failed", promptless),
        ):
            refuse(code, lambda batch=batch: engine.forward_backward_batch(batch, None, forward_only=True))


@pytest.mark.parametrize("device", ["nonsense", "meta", "cuda:7"])
def test_devices_to_which_nothing_can_move(build: Build, device: str) -> None:
    """Only the CPU and the engine's own device."""
    refuse("config.invalid-value", lambda: build().to(device))


def test_one_rank_is_the_whole_group(build: Build) -> None:
    """Its layout says so."""
    assert EngineLayout(data_parallel_rank=0, data_parallel_size=1, is_output_rank=True) == build().layout


def test_settings_are_checked() -> None:
    """Unknown keys, unknown choices and numbers out of range are refused with their path."""
    assert Config(wrap="layers") == structure(Config, {"wrap": "layers"})
    for settings in ({"warp": "layers"}, {"wrap": "layer"}, {"logits_chunk": 0}, {"collective_timeout": "soon"}):
        with pytest.raises(ConfigError):
            structure(Config, settings)


def test_manifest_names_what_is_there() -> None:
    """The object is an engine, the config its settings."""
    manifest = tomllib.loads(resources.files("jackfield_engine_fsdp").joinpath("plugin.toml").read_text())
    found = []
    for key in ("object", "config"):
        module, name = manifest[key].split(":")
        found.append(getattr(import_module(module), name))
    assert [FSDPEngine, Config] == found
    assert issubclass(FSDPEngine, BaseEngine)
    assert FSDPEngine.abi_version == manifest["abi"]


def test_settings_are_importable_without_torch() -> None:
    """Validating a configuration must not cost seconds, nor need torch."""
    code = "import sys, jackfield_engine_fsdp.config; assert not {'torch', 'transformers', 'peft'} & set(sys.modules)"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)


def test_the_memory_of_a_device_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine gets the part that placement has given it, on the device of its rank."""
    given: list[tuple[float, torch.device]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *each: given.append(each))
    place: dict[str, Any] = {
        "role": "actor",
        "model": ModelSpec(path="none"),
        "optimizer": None,
        "device": "cuda",
        "local_rank": 1,
    }
    assert torch.device("cuda:1") == device_of(EngineContext(**place))
    device_of(EngineContext(**place, memory_fraction=0.25))
    assert [(0.25, torch.device("cuda:1"))] == given


def test_an_adapter_of_a_tied_output_layer(build: Build, untied_folder: Path) -> None:
    """Merged, it would change the embeddings, too; an output layer with weights of its own may have one."""
    adapter = LoraSpec(rank=2, target_modules=("q_proj", "lm_head"))
    error = refuse("config.invalid-value", lambda: build(lora=adapter))
    assert ("model.lora.target_modules", "lm_head") == (error.where, error.found)
    build(folder=untied_folder, lora=adapter)
