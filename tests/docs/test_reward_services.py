"""The guides' rewards of services: a run is scored by a server on this machine."""

from __future__ import annotations

import asyncio
import json
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc.reward import RewardAgent, RewardContext, ScoreRequest, ScoreResult
from jackfield.compose import run
from jackfield.config import load_config
from jackfield.plugins import load_plugin

GUIDES = Path(__file__).parents[2] / "examples" / "guides"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """The address of the guide's judge."""
    program = [sys.executable, "-u", str(GUIDES / "judge_server.py"), "0"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def steps(file: str, folder: Path, model: Path, tasks: Path, *overrides: str) -> list[dict[str, Any]]:
    """Run two steps of a guide's file and return their metrics."""
    small = [
        f"folder={folder}",
        f"model.path={model}",
        f"data.train={tasks}",
        f"data.eval={tasks}",
        "data.groups_per_batch=2",
        "sampling.max_new_tokens=4",
        "evaluation.sampling.max_new_tokens=4",
        "schedule.steps=2",
        "observe.progress=false",
        "observe.report_to=[]",
        "observe.curve=false",
    ]
    assert 2 == run(load_config(GUIDES / file, [*small, *overrides])).steps
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["kind"] == "step"]


def test_a_judge_scores_a_run(address: str, model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    found = steps("judge.yaml", tmp_path, model_folder, tasks, f"reward.url={address}/v1")
    assert all(0 <= step["reward/mean"] <= 1 for step in found)
    assert [0.0, 0.0] == [step["reward/repaired/mean"] for step in found]


def test_a_service_scores_a_run(address: str, model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    found = steps(
        "http_reward.yaml", tmp_path, model_folder, tasks, f"reward.url={address}/score", f"reward.health={address}/"
    )
    assert all(0 <= step["reward/mean"] <= 1 for step in found)


@pytest.mark.timeout(120)
def test_how_a_reward_is_called_is_a_section(model_folder: Path, tasks: Path, tmp_path: Path) -> None:
    """The guide's file calls the guide's reward, and keeps the scores."""
    more = [f"reward.path={GUIDES / 'my_reward.py'}:compute_score", f"reward_service.cache={tmp_path / 'cache'}"]
    found = steps("reward_service.yaml", tmp_path / "run", model_folder, tasks, "evaluation.every=0", *more)
    assert all(0 < step["reward/words/mean"] <= 4 for step in found)
    assert (tmp_path / "cache" / "scores.sqlite").is_file()


@pytest.mark.timeout(120)
def test_a_served_model_is_a_judge(model_folder: Path, tmp_path: Path) -> None:
    """The model knows nothing, so its answer cannot be read, twice; the requests are those that the address takes."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 512}), encoding="utf-8")
    serve = runpy.run_path(str(GUIDES / "serve_openai.py"))["serve"]
    settings = {
        "model": "policy",
        "sampling": {"max_tokens": 4, "temperature": 0},
        "rubric": {"text": "{solution_str}"},
    }

    async def served() -> ScoreResult:
        address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        serving = asyncio.create_task(serve(str(folder), {"model_name": "policy"}, address.set_result))
        try:
            await asyncio.wait({serving, address}, return_when=asyncio.FIRST_COMPLETED)
            url = await address if address.done() else await serving
            agent: RewardAgent = load_plugin("reward", "judge").build({"url": url, **settings}, RewardContext())
            await agent.start()
            try:
                return await agent.compute_score(ScoreRequest(data_source="t", solution_str="w5", ground_truth="w5"))
            finally:
                await agent.close()
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)

    result = asyncio.run(served())
    assert ("failed", True) == (result.status, "[reward.output]" in str(result.error)), result.error
    assert result.raw
    assert result.tokens > 2 * 64, "two requests, as the model's server counts their tokens"
