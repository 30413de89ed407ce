"""Failures that name samples, and checkpoints that do not fit or are written in the background."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from jackfield.abc.engine import LoadCheckpointRequest, LoraSpec, OptimizerSpec, SaveCheckpointRequest
from jackfield.errors import EngineError
from jackfield.sdk.samples import naming_samples, sample_name
from jackfield_engine_fsdp import checkpointing

Rows = list[dict[str, list[Any]]]
Build = Callable[..., Any]


def broken(output: Any, data: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss with advantages that are not finite."""
    return (output.log_probs * data["advantages"]).sum(), {}


def poisoned(kit: ModuleType, rows: Rows, *which: int) -> Any:
    rows = [{**row, "advantages": [float("nan"), *row["advantages"][1:]]} if index in which else row
            for index, row in enumerate(rows)]  # fmt: skip
    return kit.make_batch(rows)


def test_a_step_that_is_skipped_names_its_samples(
    kit: ModuleType, build: Build, rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    """The weights stay, and one warning has the names of the samples with values that are not finite."""
    engine = build(optimizer=OptimizerSpec(on_nonfinite="skip"))
    before = kit.weights(engine)
    names = [f"sample {letter}" for letter in "abcdefgh"]
    with naming_samples(names), caplog.at_level(logging.WARNING, "jackfield"):
        kit.train(engine, poisoned(kit, rows, 1, 5), broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in kit.weights(engine).items())
    (record,) = caplog.records
    assert "sample b, sample f" in record.getMessage()
    assert "sample a" not in record.getMessage()


def test_a_run_that_stops_names_its_samples(kit: ModuleType, build: Build, rows: Rows) -> None:
    """Gradients of earlier passes are named, too; without names, rows are."""
    engine = build()
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(poisoned(kit, rows, 2), broken)
        engine.forward_backward_batch(kit.make_batch(rows), broken)
        with pytest.raises(EngineError) as caught:
            engine.optimizer_step()
    assert ("engine.not-finite", "row 2") == (caught.value.code, caught.value.where)
    assert "row 0" == sample_name(0)


def test_too_little_memory_names_the_micro_batch(
    kit: ModuleType, build: Build, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples, tokens and the setting to change; the engine works again afterwards."""
    engine = build(micro_batch_tokens=40)
    forward, calls = engine._model.forward, []

    def small(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.73 GiB. More text")
        return forward(*arguments)

    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    monkeypatch.setattr(engine._model, "forward", small)
    names = [f"sample {letter}" for letter in "abcdefgh"]
    with engine.train_mode(), naming_samples(names), pytest.raises(EngineError) as caught:
        engine.forward_backward_batch(batch, loss)
    assert "engine.out-of-memory" == caught.value.code
    assert str(caught.value.where).startswith("micro-batch 2 of ")
    assert "sample " in str(caught.value.where)
    assert "tokens" in str(caught.value.found)
    assert "CUDA out of memory" in str(caught.value.found)
    assert "cluster.micro_batch_tokens" in str(caught.value.fix)
    monkeypatch.undo()
    other = build()
    assert kit.gradients(other, batch, loss).keys() == kit.gradients(engine, batch, loss).keys()


def test_differences_of_a_checkpoint_are_listed(build: Build, untied_folder: Path, tmp_path: Path) -> None:
    """All are counted, the first few are named, and nothing is changed."""
    build(folder=untied_folder, value_head=True).save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "a")))
    engine = build(lora=LoraSpec(rank=2))
    before = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    with pytest.raises(EngineError) as caught:
        engine.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "a"), model_only=True))
    saved = json.loads((tmp_path / "a" / "tensors" / "tensors_0.json").read_text())
    names = {name for file in saved.values() for name in file if name.startswith("model.")}
    count = len(before) + len(names)
    assert f"{count} tensors differ" in caught.value.message
    assert f"and {count - 5} more" in str(caught.value.found)
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.get_per_tensor_param()[0])


def test_a_save_in_the_background_is_the_state_of_its_beginning(
    kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps between copy and writing change nothing in the files, and only ``finish`` completes them."""
    go, write = threading.Event(), checkpointing.write_parts

    def later(*arguments: Any) -> None:
        assert go.wait(60.0)
        write(*arguments)

    monkeypatch.setattr(checkpointing, "write_parts", later)
    engine, batch, loss = build(dropout=0.1), kit.make_batch(rows), kit.PolicyLoss(rows)
    kit.train(engine, batch, loss, steps=2)
    saved = {name: tensor.clone() for name, tensor in kit.weights(engine).items()}
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "native"), background=True))
    kit.train(engine, batch, loss)
    wanted = kit.weights(engine)
    other = build(dropout=0.1, seed=5)
    with pytest.raises(EngineError):
        other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    go.set()
    engine.finish_checkpoint()
    engine.finish_checkpoint()
    other.load_checkpoint(LoadCheckpointRequest(folder=str(tmp_path / "native")))
    assert all(torch.equal(saved[name], tensor) for name, tensor in kit.weights(other).items())
    kit.train(other, batch, loss)
    assert all(torch.equal(wanted[name], tensor) for name, tensor in kit.weights(other).items())


def test_a_save_that_fails_in_the_background_raises_at_its_end(
    kit: ModuleType, build: Build, rows: Rows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training goes on, ``finish`` raises, and the next save works."""

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    engine = build()
    with monkeypatch.context() as patch:
        patch.setattr(checkpointing, "write_parts", full)
        engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "a"), background=True))
        kit.train(engine, kit.make_batch(rows), kit.PolicyLoss(rows))
        with pytest.raises(EngineError) as caught:
            engine.finish_checkpoint()
    assert "No space left" in str(caught.value.found)
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "b"), background=True))
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "c")))
    assert (tmp_path / "b" / "engine.json").is_file()
    assert (tmp_path / "c" / "engine.json").is_file()


@pytest.mark.parametrize("change", [{"use_dora": True}, {"use_rslora": True}, {"use_dora": True, "use_rslora": True}])
def test_merged_adapters_are_published_and_exported(
    kit: ModuleType, build: Build, model_folder: Path, rows: Rows, tmp_path: Path, change: dict[str, bool]
) -> None:
    """Merged weights have the base's names and the adapted model's log-probabilities; the base stays."""
    batch, loss = kit.make_batch(rows), kit.PolicyLoss(rows)
    lora = LoraSpec(rank=2, alpha=8.0, publish="merged", **change)
    engine, base = build(lora=lora, optimizer=OptimizerSpec(lr=5e-2)), build(optimizer=None)
    kit.train(engine, batch, loss, steps=3)
    tensors, config = engine.get_per_tensor_param()
    published = dict(tensors)
    assert config is None
    assert published.keys() == kit.weights(base).keys()
    engine.save_checkpoint(SaveCheckpointRequest(folder=str(tmp_path / "m"), format="huggingface", merge_adapter=True))
    merged = build(optimizer=None, folder=tmp_path / "m")
    found = kit.weights(merged)
    assert all(torch.allclose(published[name], found[name], atol=1e-6) for name in published)

    def log_probs(one: Any) -> torch.Tensor:
        with one.eval_mode():
            return one.forward_backward_batch(batch, None, forward_only=True).log_probs.values()

    assert torch.allclose(log_probs(engine), log_probs(merged), atol=1e-5)
    assert not torch.allclose(log_probs(engine), log_probs(base), atol=1e-3)
    with engine.disable_adapter():
        assert torch.allclose(log_probs(base), log_probs(engine), atol=1e-5)
