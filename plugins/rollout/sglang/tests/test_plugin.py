"""What can be seen of the plugin without SGLang: its settings and refusals."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import RolloutContext
from jackfield.errors import ConfigError, JackfieldError, PluginError, RolloutError
from jackfield.plugins import load_plugin
from jackfield_huggingface.serving import environment, visible_gpus
from jackfield_rollout_sglang.config import Config
from jackfield_rollout_sglang.server import SglangProcess, launch_arguments, read_answer
from jackfield_virtual_clock import VirtualClock


def build(path: str, **settings: Any) -> Any:
    return load_plugin("rollout", "sglang").build(settings, RolloutContext(model=ModelSpec(path=path)), "rollout")


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"max_batchsize": 3}, "rollout.max_batchsize"),
        ({"memory_fraction": 1.5}, "rollout.memory_fraction"),
        ({"arguments": {"port": 1}}, "rollout.arguments.port"),
        ({"arguments": {"quantization": "fp8"}}, "rollout.arguments.quantization"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], path: str) -> None:
    """A misspelt key, a value out of range, and what another setting stands for."""
    with pytest.raises(ConfigError) as caught:
        build("nowhere", **settings)
    assert path == caught.value.where


def test_flags_and_values_become_a_command_line() -> None:
    config = Config(
        prefix_caching=False, deterministic=False, arguments={"attention-backend": "fa3", "log-requests": True}
    )
    context = RolloutContext(model=ModelSpec(path="folder", dtype="bfloat16"), max_model_len=64, host="::1")
    line = launch_arguments(config, context, 5)
    assert ["--attention-backend", "fa3", "--log-requests", "--model-path", "folder", "--dtype", "bfloat16"] == line[:7]
    assert "--disable-radix-cache" in line
    assert not {"--trust-remote-code", "--enable-deterministic-inference", "--enable-lora", "False"} & set(line)


def test_a_run_needs_neither_torch_nor_sglang_for_it() -> None:
    """Whoever starts the server elsewhere imports its settings alone."""
    script = (
        "import sys, jackfield_rollout_sglang.config;"
        "sys.exit(int(bool({'torch', 'sglang', 'aiohttp'} & set(sys.modules))))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode


@pytest.mark.skipif(find_spec("sglang") is not None, reason="SGLang is here")
def test_where_sglang_is_missing_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "max_position_embeddings": 8}')
    with pytest.raises(PluginError) as caught:
        asyncio.run(build(str(tmp_path)).start())
    assert "plugin.requirement" == caught.value.code
    assert "cluster.interpreters.rollout" in str(caught.value.fix)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(JackfieldError) as caught:
        asyncio.run(build(str(tmp_path)).start())
    assert ("engine.model", str(tmp_path)) == (caught.value.code, caught.value.found)


def test_a_server_that_ends_instead_of_answering_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is a real one, which cannot load what is not there."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("")
    (tmp_path / "sglang" / "launch_server.py").write_text("raise SystemExit(3)")

    async def main() -> None:
        process = SglangProcess(VirtualClock(), "127.0.0.1", 9)
        try:
            await process.start([], 600.0)
        finally:
            await process.close()

    with pytest.raises(RolloutError) as caught:
        asyncio.run(main())
    assert ("rollout.stopped", "SGLang's server has ended with code 3") == (caught.value.code, caught.value.message)


@pytest.mark.parametrize(
    "answer",
    [
        {"error": {"message": "bad"}},
        {"output_ids": [1, 2], "meta_info": {"output_token_logprobs": [[-0.1, 1, None]], "finish_reason": None}},
    ],
)
def test_an_answer_that_says_too_little_is_no_sample(answer: dict[str, Any]) -> None:
    with pytest.raises(RolloutError) as caught:
        read_answer(answer, {"rid": "some"})
    assert ("rollout.failed", "some") == (caught.value.code, caught.value.where)


def test_a_place_decides_about_memory_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the placement leaves replaces the setting, and children see the GPUs from the context's on."""
    model = ModelSpec(path="m")
    for fraction, expected in ((None, "0.85"), (0.5, "0.5")):
        context = RolloutContext(model=model, device="cuda:2", memory_fraction=fraction)
        arguments = launch_arguments(Config(), context, 1)
        assert expected == arguments[arguments.index("--mem-fraction-static") + 1]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert {"CUDA_VISIBLE_DEVICES": "2,3"} == visible_gpus(context, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert {"CUDA_VISIBLE_DEVICES": "6,7"} == visible_gpus(context, 2)
    for device in ("cpu", "cuda", "cuda:0"):
        assert {} == visible_gpus(RolloutContext(model=model, device=device), 2)
    with environment({"CUDA_VISIBLE_DEVICES": "1", "JACKFIELD_NEW": "x"}):
        assert ("1", "x") == (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["JACKFIELD_NEW"])
    assert "4,5,6,7" == os.environ["CUDA_VISIBLE_DEVICES"]
    assert "JACKFIELD_NEW" not in os.environ
