"""What can be seen of the plugin without vLLM: its settings, its refusals, and what it would tell vLLM."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.engine import ModelSpec
from jackfield.abc.rollout import GenerateRequest, RolloutContext, SamplingParams
from jackfield.errors import ConfigError, JackfieldError, PluginError
from jackfield.plugins import load_plugin
from jackfield_rollout_vllm.server import vllm_arguments


def build(path: str, **settings: Any) -> Any:
    return load_plugin("rollout", "vllm").build(settings, RolloutContext(model=ModelSpec(path=path)), "rollout")


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"max_batchsize": 3}, "rollout.max_batchsize"),
        ({"memory_fraction": 1.5}, "rollout.memory_fraction"),
        ({"engine": {"logprobs_mode": "raw_logits"}}, "rollout.engine.logprobs_mode"),
        ({"engine": {"quantization": "fp8"}}, "rollout.engine.quantization"),
    ],
)
def test_settings_are_checked(settings: dict[str, Any], path: str) -> None:
    """A misspelt key, a value out of range, and what another setting stands for."""
    with pytest.raises(ConfigError) as caught:
        build("nowhere", **settings)
    assert path == caught.value.where


def test_a_run_needs_neither_torch_nor_vllm_for_it() -> None:
    """Whoever starts the server elsewhere imports its settings alone."""
    script = (
        "import sys, jackfield_rollout_vllm.config, jackfield_rollout_vllm.server;"
        "sys.exit(int('torch' in sys.modules or 'vllm' in sys.modules))"
    )
    assert 0 == subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is here")
def test_where_vllm_is_missing_the_error_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PluginError) as caught:
        asyncio.run(build(str(tmp_path)).start())
    assert "plugin.requirement" == caught.value.code
    assert "cluster.interpreters.rollout" in str(caught.value.fix)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(JackfieldError) as caught:
        asyncio.run(build(str(tmp_path)).start())
    assert ("engine.model", str(tmp_path)) == (caught.value.code, caught.value.found)


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(request_id="some", prompt_ids=prompt, sampling=SamplingParams(**sampling))


def test_vllm_filters_nothing_itself() -> None:
    """Its order is another one: the filters are the plugin's, and greedy requests have none."""
    told = vllm_arguments(request(5, 6, top_k=3, top_p=0.5, min_p=0.1, max_new_tokens=9), 7, 8)
    assert not {"top_k", "top_p", "min_p"} & told.keys()
    assert {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "divisor": 1.0, "raw": False} == told["extra_args"]["jackfield"]
    assert (6, False) == (told["max_tokens"], told["detokenize"])
    greedy = vllm_arguments(request(5, temperature=0, top_k=3, top_p=0.5), 7, 8)
    assert {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "divisor": 1.0, "raw": True} == greedy["extra_args"]["jackfield"]


def test_every_bit_of_a_seed_counts() -> None:
    """torch's generator of CPUs takes 32 bits."""
    seeds = [0, 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62]
    assert len(seeds) == len({vllm_arguments(request(5), seed, 8)["seed"] % (1 << 32) for seed in seeds})
