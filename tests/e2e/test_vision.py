"""A vision-language model learns from pixels, by the example and by supervised training."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from jackfield.compose import run
from jackfield.config import load_config
from jackfield_commands import CommandServer

from .conftest import ROOT, metrics

VISION = ROOT / "examples" / "vision"


def vision(jackfield: CommandServer, folder: Path, *arguments: str) -> list[dict[str, float]]:
    """Run the example; return its evaluations."""
    file = str(VISION / "vision.py")
    command = jackfield.start(file, "--folder", str(folder), *arguments, program="python", folder=folder.parent)
    done = command.wait(840)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    return [line for line in metrics(folder / "grpo") if line["kind"] == "evaluation"]


#: The model sees a picture in its task and, if it has not said a placeholder itself, the same one in the next turn.
TWO_TURNS = """
from jackfield_agent_workflow import RolloutEnded, Workflow

class TwoTurns(Workflow):
    async def run(self, task):
        reply = await self.model.chat(task.messages, max_new_tokens=2)
        try:
            reply = await self.model.chat([*task.messages, reply.message, *task.messages])
            self.metric("seen_twice", 1)
        except RolloutEnded:
            pass
        self.reward(float(len(reply.text) % 2))
"""


@pytest.mark.timeout(180)
def test_pictures_of_later_turns_reach_server_and_engine(tmp_path: Path) -> None:
    """Three steps of GRPO: the engine's log-probs of each sequence are those of the server that has seen the turns."""
    spec = importlib.util.spec_from_file_location("jackfield_example_vision", VISION / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    module.make_task(made := tmp_path / "made", 1, {"problems": 32, "held_out": 4})
    (tmp_path / "turns.py").write_text(TWO_TURNS)
    settings = [
        *(f"folder={tmp_path / 'run'}", f"model.path={made / 'model'}", f"data.train={made / 'problems.jsonl'}"),
        *("data.eval=null", "evaluation.every=0", "data.groups_per_batch=4", "data.rollouts_per_group=4"),
        *("schedule.steps=3", "log_prob_check.every=1", "sampling.max_new_tokens=6", "observe.progress=false"),
        *("observe.curve=false", "observe.report_to=[]"),
        f"agent={{name: workflow_images, workflow: '{tmp_path / 'turns.py'}:TwoTurns'}}",
    ]
    assert 3 == run(load_config(VISION / "grpo.yaml", settings)).steps
    lines = [line for line in metrics(tmp_path / "run") if line["kind"] == "step"]
    assert all(line["log_prob_check/rollout/max"] < 1e-3 for line in lines)
    assert all(line["grad_norm"] > 0 for line in lines)
    assert all(line["agent/seen_twice/mean"] > 0.3 for line in lines)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("steps", "score"), [(24, 0.4), pytest.param(120, 0.9, marks=pytest.mark.nightly)], ids=["short", "whole"]
)
def test_a_model_learns_from_pixels(jackfield: CommandServer, tmp_path: Path, steps: int, score: float) -> None:
    """The score on pictures that it has never seen rises far above 0.25, which is the most for a model that is blind.

    The short form leads from 0.00 to 0.61 with seed 2, and to 0.66 with seed 3; with seed 1, 30 steps lead to 0.64.

    The log-probs of server and engine are compared on the way, with the images.
    """
    folder = tmp_path / "vision"
    given = [f"schedule.steps={steps}", f"evaluation.every={min(steps, 30)}", "observe.samples_per_step=4"]
    evaluations = vision(jackfield, folder, *given)
    assert evaluations[0]["score"] < 0.2
    assert max(each["score"] for each in evaluations) >= score, evaluations
    lines = metrics(folder / "grpo")
    distances = [line["log_prob_check/rollout/max"] for line in lines if "log_prob_check/rollout/max" in line]
    assert distances
    assert max(distances) < 1e-3
    pictures = {
        name: {json.loads(line)["prompt"][0]["content"][0]["image_url"]["url"] for line in text.splitlines()}
        for name in ("problems", "held_out")
        if (text := (folder / "made" / f"{name}.jsonl").read_text())
    }
    assert not pictures["problems"] & pictures["held_out"]
