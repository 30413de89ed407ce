"""What can be seen of the plugin without TensorRT-LLM: its settings, its refusals, and what it would tell it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.errors import ConfigError, PluginError, RolloutError
from jackfield.plugins import load_plugin
from jackfield_rollout_trtllm.server import cache_fraction, new_tokens


def build(path: str, **settings: Any) -> Any:
    return load_plugin("rollout", "trtllm").build(settings, RolloutContext(model=ModelSpec(path=path)), "rollout")


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"max_batchsize": 3}, "rollout.max_batchsize"),
        ({"memory_fraction": 0.0}, "rollout.memory_fraction"),
        ({"arguments": {"kv_cache_config": {}}}, "rollout.arguments.kv_cache_config"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], path: str) -> None:
    """A misspelt key, a value out of range, and what another setting stands for."""
    with pytest.raises(ConfigError) as caught:
        build("nowhere", **settings)
    assert path == caught.value.where


def test_a_run_needs_neither_torch_nor_tensorrt_llm_for_it() -> None:
    script = (
        "import sys, jackfield_rollout_trtllm.config, jackfield_rollout_trtllm.server;"
        "sys.exit(int(bool({'torch', 'tensorrt_llm'} & set(sys.modules))))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode


@pytest.mark.skipif(find_spec("tensorrt_llm") is not None, reason="TensorRT-LLM is here")
def test_where_it_is_missing_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 8}')
    with pytest.raises(PluginError) as caught:
        asyncio.run(build(str(tmp_path)).start())
    assert "plugin.requirement" == caught.value.code
    assert "cluster.interpreters.rollout" in str(caught.value.fix)


def test_log_probs_are_numbers_or_among_the_likeliest_tokens() -> None:
    completion = SimpleNamespace(
        token_ids=[4, 5, 6], logprobs=[-0.5, {5: SimpleNamespace(logprob=-0.25), 9: None}, {6: -1}]
    )
    assert ([5, 6], [-0.25, -1.0]) == new_tokens(completion, 1, "some")
    for logprobs in ([-0.5], [-0.5, -0.5, {7: -1.0}]):
        with pytest.raises(RolloutError) as caught:
            new_tokens(SimpleNamespace(token_ids=[4, 5, 6], logprobs=logprobs), 0, "some")
        assert ("rollout.failed", "some") == (caught.value.code, caught.value.where)


def test_a_worker_hands_every_file_to_the_loader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its modules are prepared for a reload once in an update; the base class and the decorator are stand-ins."""
    utilities, extension = ModuleType("tensorrt_llm._ray_utils"), ModuleType("tensorrt_llm.llmapi.rlhf_utils")
    utilities.control_action_decorator = lambda method: method  # type: ignore[attr-defined]
    extension.WorkerExtension = object  # type: ignore[attr-defined]
    for name in ("tensorrt_llm", "tensorrt_llm.llmapi"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, utilities.__name__, utilities)
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    monkeypatch.delitem(sys.modules, "jackfield_rollout_trtllm.worker", raising=False)
    from jackfield_rollout_trtllm import worker as module

    monkeypatch.setattr(module, "load_file", lambda file, device: {file.stem: device})
    for name in ("part-00001", "part-00000"):
        save_file({"tensor": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    prepared: list[str] = []
    reloaded: list[Any] = []
    part = SimpleNamespace(pre_reload_weights=lambda: prepared.append("part"))
    model = SimpleNamespace(modules=lambda: [part, SimpleNamespace()])
    loader = SimpleNamespace(reload=lambda *arguments, **options: reloaded.append((arguments[1], options)))
    worker = module.WorkerExtension()
    worker.engine = SimpleNamespace(model_engine=SimpleNamespace(model=model, model_loader=loader))
    worker.device_id = 3
    for _ in range(2):
        worker.jackfield_load(str(tmp_path))
    assert ["part"] == prepared
    partial = {"allow_partial_loading": True}
    assert [({"part-00000": "cuda:3"}, partial), ({"part-00001": "cuda:3"}, partial)] * 2 == reloaded
    monkeypatch.delitem(sys.modules, "jackfield_rollout_trtllm.worker")


def test_the_cache_has_what_a_share_of_the_gpu_leaves() -> None:
    """Half of 80 bytes less 20 of weights, of the 60 less 20 that are free when the model is loaded."""
    assert 20 / 40 == cache_fraction(0.5, total=80, free=60, weights=20)
    assert 1.0 == cache_fraction(0.9, total=80, free=50, weights=20)
    for share, weights in ((0.25, 20), (0.5, 61)):
        with pytest.raises(RolloutError) as caught:
            cache_fraction(share, total=80, free=60, weights=weights)
        assert "rollout.memory_fraction" == caught.value.where
