"""What a plugin returns or a user sets is used and shown, or refused: nothing is dropped without a word."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield_commands import CommandServer, Completed

pytestmark = pytest.mark.timeout(120)

QUICKSTART = Path(__file__).resolve().parents[2] / "examples" / "quickstart"

AGENT = """
import itertools

import attrs
from jackfield.abc.agent import AgentLoopBase, AgentLoopOutput, AgentSequence
from jackfield.abc.rollout import GenerateRequest, SamplingParams

NUMBERS = itertools.count()

class Agent(AgentLoopBase):
    async def run(self, sampling_params, **fields):
        prompt = self.context.tokenizer.encode_chat(fields["messages"])
        sampling = SamplingParams(**sampling_params)
        request_id = f"{self.context.request_prefix}/{next(NUMBERS)}"
        request = GenerateRequest(request_id=request_id, prompt_ids=prompt, sampling=sampling)
        result = await self.context.generate(request)
        if self.config.mode == "raise":
            raise ValueError("the tool is out of order")
        if self.config.mode == "exit":
            raise SystemExit("the tool is out of order")
        sequence = AgentSequence(
            prompt_ids=prompt,
            response_ids=result.token_ids,
            response_mask=(1,) * len(result.token_ids),
            response_log_probs=result.log_probs,
            weight_versions=result.weight_versions,
            multi_modal_inputs={"pixel_values": [0.0]} if self.config.mode == "image" else {},
        )
        length = float(len(result.token_ids))
        metrics = {"length": float("nan") if self.config.mode == "nan" else length}
        return AgentLoopOutput(sequences=(sequence,), num_turns=len(result.token_ids), metrics=metrics)
"""
CONFIG = """
import attrs

@attrs.frozen
class Config:
    mode: str = "plain"
"""
MANIFEST = """
name = "observant"
kind = "agent"
abi = "1.0"
object = "observant.plugin:Agent"
config = "observant.config:Config"
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installer leaves of the agent plugin ``observant``."""
    site = tmp_path_factory.mktemp("site")
    package, info = site / "observant", site / "observant-0.1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (package / "__init__.py").write_text("")
    (package / "plugin.py").write_text(textwrap.dedent(AGENT))
    (package / "config.py").write_text(textwrap.dedent(CONFIG))
    (package / "plugin.toml").write_text(MANIFEST)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: observant\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[jackfield.agents]\nobservant = observant:plugin.toml\n")
    return site


Run = Callable[..., Completed]


@pytest.fixture
def run(jackfield: CommandServer, site: Path, quickstart_settings: Callable[..., list[str]]) -> Run:
    def run(name: str, *overrides: str) -> Completed:
        arguments = quickstart_settings(name, "schedule.max_retries=1", *overrides)
        return jackfield("run", *arguments, environment={"PYTHONPATH": str(site)})

    return run


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_metrics_and_turns_of_an_agent(run: Run, tmp_path: Path) -> None:
    """Are on each sample of the tables, and their means in the metrics of the step and the evaluation."""
    given = ["schedule.steps=1", "evaluation.every=1", "evaluation.tasks=4", "observe.samples_per_step=16"]
    given += ["observe.samples_per_evaluation=3"]
    ended = run("agent", "agent=observant", *given)
    assert 0 == ended.code, ended.error
    [step] = [line for line in lines(tmp_path / "agent" / "metrics.jsonl") if line["kind"] == "step"]
    table = lines(tmp_path / "agent" / "samples" / "train.jsonl")
    lengths = [len(row["response_ids"]) for row in table]
    assert lengths == [row["tags"]["turns"] for row in table]
    assert lengths == [row["tags"]["agent/length"] for row in table]
    mean = pytest.approx(sum(lengths) / len(lengths))
    assert 16 == len(lengths)
    assert mean == step["agent/turns"]
    assert mean == step["agent/length/mean"]
    evaluations = [line for line in lines(tmp_path / "agent" / "metrics.jsonl") if line["kind"] == "evaluation"]
    assert evaluations
    for evaluation in evaluations:
        assert evaluation["response_tokens"] == pytest.approx(evaluation["agent/turns"])
        assert evaluation["response_tokens"] == pytest.approx(evaluation["agent/length/mean"])
    shown = lines(tmp_path / "agent" / "samples" / "eval.jsonl")
    assert 3 * len(evaluations) == len(shown)
    for row in shown:
        assert len(row["response_ids"]) == row["tags"]["turns"] == row["tags"]["agent/length"]


@pytest.mark.parametrize(("mode", "word"), [("image", "pixel_values"), ("nan", "length")])
def test_what_cannot_be_used_is_refused(run: Run, tmp_path: Path, mode: str, word: str) -> None:
    ended = run(mode, "agent=observant", f"agent.mode={mode}")
    assert 1 == ended.code
    assert "agent.output" in ended.error
    assert word in ended.error
    assert "Traceback" not in ended.error


@pytest.mark.parametrize(("mode", "kind"), [("raise", "ValueError"), ("exit", "SystemExit")])
def test_an_agent_that_always_raises(run: Run, tmp_path: Path, mode: str, kind: str) -> None:
    """The error leads with its exception, and equal ones are counted."""
    ended = run(mode, "agent=observant", f"agent.mode={mode}")
    assert 1 == ended.code
    first = ended.error.splitlines()[0]
    assert first.startswith("[queue.batch-failed] ")
    assert f"4 × {kind}: the tool is out of order" in first
    assert 1 == ended.error.count("the tool is out of order"), ended.error
    failed = lines(tmp_path / mode / "samples" / "failed.jsonl")
    assert failed, "the failures that ended the run are in the table"
    assert all(row["key"].count("/") == 4 and "the tool is out of order" in row["reason"] for row in failed), failed


def test_a_reward_that_always_raises(run: Run, tmp_path: Path) -> None:
    """The error leads with its exception, too, and DAPO's filter does not hide it."""
    file = tmp_path / "reward.py"
    file.write_text("def score(**_):\n    raise ValueError('no such unit')\n")
    reward = f"reward={{name: function, path: '{file}:score', try_first: false}}"
    ended = run("reward", reward, "algorithm.name=dapo")
    assert 1 == ended.code
    first = ended.error.splitlines()[0]
    assert "× ValueError: no such unit" in first, ended.error


def test_equal_rewards_are_no_failure(run: Run, tmp_path: Path) -> None:
    """DAPO replaces groups of equal rewards; when none other come, it trains on what there is, and nothing failed."""
    file = tmp_path / "reward.py"
    file.write_text("def score(**_):\n    return 1.0\n")
    ended = run("equal", f"reward={{name: function, path: '{file}:score'}}", "algorithm.name=dapo", "schedule.steps=1")
    assert 0 == ended.code, ended.error
    assert not (tmp_path / "equal" / "samples" / "failed.jsonl").exists()
    [step] = [line for line in lines(tmp_path / "equal" / "metrics.jsonl") if line["kind"] == "step"]
    assert 4 == step["groups/retries"]


def test_a_seed_of_the_sampling_is_the_base_of_all_requests(run: Run, tmp_path: Path) -> None:
    """Another one draws other answers, the run's own seed as ``sampling.seed`` the same."""
    answers = []
    for name, given in (("none", []), ("same", ["sampling.seed=1"]), ("other", ["sampling.seed=2"])):
        ended = run(name, "seed=1", "schedule.steps=1", "observe.samples_per_step=16", *given)
        assert 0 == ended.code, ended.error
        rows = sorted(lines(tmp_path / name / "samples" / "train.jsonl"), key=lambda row: row["key"])
        answers.append([(row["prompt"], row["response_ids"]) for row in rows])
    assert answers[0] == answers[1]
    assert answers[0] != answers[2]
    assert [prompt for prompt, _ in answers[0]] == [prompt for prompt, _ in answers[2]]


@pytest.mark.parametrize(
    ("code", "where", "hint", "overrides"),
    [
        (
            "config.unknown-key",
            "algorithm.loss.options.clip_hgih",
            "clip_high",
            ["algorithm.loss.options.clip_hgih=0.3"],
        ),
        ("config.unknown-key", "algorithm.advantages.options.epz", "eps", ["algorithm.advantages.options.epz=0.3"]),
        ("config.wrong-type", "algorithm.loss.options.clip_low", ">= 0", ["algorithm.loss.options.clip_low=wide"]),
        ("algorithm.unknown", "algorithm: loss", "ppo", ["algorithm.loss.name=poo"]),
        ("algorithm.unknown", "algorithm: algorithm", "grpo", ["algorithm.name=grpoo"]),
    ],
)
def test_options_of_parts_are_checked_before_anything(
    jackfield: CommandServer, run: Run, tmp_path: Path, code: str, where: str, hint: str, overrides: list[str]
) -> None:
    """By ``config validate`` and by ``run`` alike, with the option's path and what was meant."""
    validated = jackfield("config", "validate", str(QUICKSTART / "grpo.yaml"), *overrides)
    ran = run("refused", *overrides)
    assert (1, 1) == (validated.code, ran.code)
    assert validated.error == ran.error
    assert ran.error.startswith(f"[{code}] ")
    assert where in ran.error
    assert hint in ran.error
    assert not (tmp_path / "refused").exists()
