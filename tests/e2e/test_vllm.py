"""A run whose rollout server is vLLM, in an environment with other versions than the engine's."""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
from pathlib import Path

import pytest

from jackfield_testing import vllm_python

from .conftest import Run
from .test_modes import GRADED, steps

pytestmark = [pytest.mark.needs("vllm"), pytest.mark.timeout(600)]  # vLLM takes a minute to start on a busy machine

#: A program that streams its answers: vLLM has no address of its own here, and gets one through the gateway.
PROGRAM = """
import openai

async def solve(task, base_url, api_key):
    chunks = 0
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:
        messages = [{"role": "user", "content": task["question"]}]
        async for chunk in await client.chat.completions.create(model="policy", messages=messages, stream=True):
            chunks += bool(chunk.choices[0].delta.content)
    return {"metrics": {"chunks": chunks}}
"""


def test_grpo_with_vllm_in_another_environment(small_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both load the same model with different versions of transformers, and agree on log-probabilities at every step.

    The engine computes those of each step's responses again, which vLLM has made after the update of the step before,
    as a program has streamed them through the gateway.
    """
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker in the core's process, also on a CPU
    python = str(vllm_python())
    script = "import importlib.metadata as m; print(m.version('transformers'))"
    there = subprocess.run([python, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert importlib.metadata.version("transformers") != there.strip()
    _, lines = small_run(
        "vllm",
        *GRADED,
        f"agent={{name: gateway, program: {{call: '{tmp_path / 'program.py'}:solve', process: false}}}}",
        "rollout={name: vllm, eager: true, kv_cache_bytes: 67108864, engine: {distributed_executor_backend: uni}}",
        f"cluster.interpreters={{rollout: {python}}}",
        "cluster.threads=1",
        "optimizer.lr=0.01",
        "algorithm.old_log_probs=engine",
    )
    done = steps(lines)
    assert [1, 2, 3] == [line["step"] for line in done]
    assert all(math.isfinite(line["grad_norm"]) and line["grad_norm"] > 0 for line in done)
    assert all(line["log_prob_check/replica/mean"] < 1e-4 for line in done)
    assert all(line["agent/chunks/mean"] > 1 for line in done)
    for line in done:  # of the engine's to vLLM's probability, token by token
        assert [pytest.approx(1.0, abs=1e-3)] * 2 == [line["correction/min"], line["correction/max"]]
