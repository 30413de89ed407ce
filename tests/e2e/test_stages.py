"""Stages of one file: in order, each from the model of the one before, also after kill -9."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

from jackfield_commands import CommandServer

from .test_collected import lines, ok, wait_until
from .test_modes import GRADED

pytestmark = pytest.mark.timeout(240)

Settings = Callable[..., list[str]]
SMALL = ("data.groups_per_batch=2", "data.rollouts_per_group=2", "sampling.max_new_tokens=4", *GRADED)


@pytest.fixture
def staged(quickstart_settings: Settings, made: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """``staged(*overrides)``: arguments of a run of SFT, then GRPO, then GRPO on what SFT's model is asked again."""

    def arguments(*overrides: str, **stages: dict[str, object]) -> list[str]:
        file, *settings = quickstart_settings("staged", *SMALL)
        values = yaml.safe_load(Path(file).read_text())
        demonstrations = str(made / "demonstrations.jsonl")
        values["stages"] = stages or {
            "sft": {
                "mode": "offline",
                "algorithm": {"name": "sft", "loss": None},
                "data": {"train": demonstrations},
                "schedule": {"steps": 4},
            },
            "grpo": {"schedule": {"steps": 100, "until": {"samples": 8}}},
            "more": {"schedule": {"steps": 1}, "optimizer": {"lr": 1e-4}},
        }
        values["algorithm"] = {"name": "grpo"}
        values["data"] = {"train": str(made / "problems.jsonl")}
        kept = [each for each in settings if not each.startswith(("data.train", "schedule.steps"))]
        (tmp_path / "staged.yaml").write_text(yaml.safe_dump(values, sort_keys=False))
        return [str(tmp_path / "staged.yaml"), *kept, *overrides]

    return arguments


def test_each_stage_starts_from_the_model_of_the_one_before(
    jackfield: CommandServer, staged: Callable[..., list[str]], tmp_path: Path
) -> None:
    said = ok(jackfield("run", *staged("optimizer.lr=0")))
    folders = [tmp_path / "staged" / name for name in ("1-sft", "2-grpo", "3-more")]
    shown = [line for line in said.splitlines() if line.startswith("stage")]
    named = [f"stage {n} of 3: {folder.name[2:]}, in {folder}" for n, folder in enumerate(folders, 1)]
    assert named == shown
    assert [4, 2, 1] == [len(lines(folder)) for folder in folders]
    configs = [yaml.safe_load((folder / "config.yaml").read_text()) for folder in folders]
    assert [str(folder / "model") for folder in folders[:2]] == [each["model"]["path"] for each in configs[1:]]
    assert ["sft", "grpo", "grpo"] == [each["algorithm"]["name"] for each in configs]
    assert [0.0] * 3 == [each["optimizer"]["lr"] for each in configs], "an override holds for all stages"
    assert "holds the finished run" in ok(jackfield("run", *staged("optimizer.lr=0")))
    explained = ok(jackfield("config", "explain", *staged("optimizer.lr=0")))
    heads = [f"stage {folder.name[2:]}, in {folder}:" for folder in folders]
    assert heads == [line for line in explained.splitlines() if line.startswith("stage ")]
    of_stage = explained.split("stage grpo")
    assert "4 steps train on answers from the data; nothing is generated" in of_stage[0]
    assert "Every token is of the weights that its step starts from." in of_stage[1]
    assert "schedule.until.samples = 8" in of_stage[1]
    valid = json.loads(ok(jackfield("config", "validate", *staged("optimizer.lr=0"), "--json")))
    losses = {name: each["loss"]["name"] for name, each in valid["stages"].items()}
    assert {"sft": "sft", "grpo": "ppo", "more": "ppo"} == losses
    later = ok(jackfield("run", *staged("optimizer.lr=0", "stages.more.schedule.steps=2")))
    assert "2 steps done" in later
    assert [4, 2, 2] == [len(lines(folder)) for folder in folders], "one stage alone got another step"


@pytest.mark.parametrize("stage", ["1-sft", "2-grpo", "3-more"])
def test_a_killed_run_goes_on_in_the_same_stage(
    jackfield: CommandServer, staged: Callable[..., list[str]], tmp_path: Path, stage: str
) -> None:
    """Killed in a stage, then the same command: finished stages are not done again, and the result is the same."""
    command = ("run", *staged("checkpoint.every=1", "rollout.batch_invariant=true"))
    ended, folder = jackfield.start(*command), tmp_path / "staged"
    wait_until(ended, lambda: (folder / stage / "checkpoints" / "step_00000001").exists())
    ended.send(signal.SIGKILL)
    ended.wait()
    before = {file: file.read_bytes() for file in folder.glob("*/finished.json")}
    models = [file.with_name("model") / "model.safetensors" for file in before]
    model = {file: file.stat().st_mtime_ns for file in models}
    ok(jackfield(*command))
    assert all(file.read_bytes() == content for file, content in before.items())
    assert all(file.stat().st_mtime_ns == time for file, time in model.items())
    assert [4, 2, 1] == [len({line["step"] for line in lines(folder / name)}) for name in ("1-sft", "2-grpo", "3-more")]
    first = load_file(folder / "1-sft" / "model" / "model.safetensors")
    last = load_file(folder / "3-more" / "model" / "model.safetensors")
    assert first.keys() == last.keys()


@pytest.mark.parametrize(
    ("stages", "where"),
    [
        ({"one": {}, "two": {"algorithm": {"nam": "grpo"}}}, "algorithm.nam"),
        ({"one": {}, "two": {"data": {"train": "absent.jsonl"}}}, "stage two"),
        ({"one": {}, "two": {"algorithm": {"name": "sft"}}}, "stage two: mode"),
        ({"one": {"model": {"lora": {"rank": 2}}}, "two": {}}, "stage one: model.lora"),
        ({"one": {"mode": "explore"}, "two": {}}, "stage one: mode"),
        ({"one": {"mode": "train"}, "two": {}}, "stage one: data.samples"),
        ({"one": {}, "two": {"schedule": {"until": {"score": 0.5}}}}, "stage two: evaluation.every"),
        ({"one": 3}, "stages.one"),
    ],
    ids=str,
)
def test_errors_of_later_stages_are_found_before_the_first_one_starts(
    jackfield: CommandServer, staged: Callable[..., list[str]], tmp_path: Path, stages: dict[str, object], where: str
) -> None:
    refused = jackfield("run", *staged(**stages))
    assert 1 == refused.code
    assert where in refused.error
    for command in ("validate", "explain") if "absent" not in str(stages) else ():
        checked = jackfield("config", command, *staged(**stages))
        assert (1, refused.error) == (checked.code, checked.error)
    assert not (tmp_path / "staged").exists()


@pytest.mark.parametrize(
    ("override", "where"),
    [
        ("stages.moer.schedule.steps=2", "stages.moer"),
        ("stages={}", "stages.grpo"),
        ("stages.more.model.path=missing", "stage more: model.path"),
    ],
)
def test_what_no_stage_can_have_is_refused_before_the_first_one(
    jackfield: CommandServer, staged: Callable[..., list[str]], tmp_path: Path, override: str, where: str
) -> None:
    words = [each.replace("model.path=", "stages.sft.model.path=") for each in staged()]
    refused = jackfield("run", *words, override)
    assert 1 == refused.code
    assert f"at {where}" in refused.error
    assert not (tmp_path / "staged").exists()


def test_a_stage_that_began_with_a_model_that_has_changed_since_is_not_skipped(
    jackfield: CommandServer, staged: Callable[..., list[str]], tmp_path: Path
) -> None:
    ok(jackfield("run", *staged()))
    refused = jackfield("run", *staged("stages.grpo.schedule.until.samples=12"))
    assert 1 == refused.code
    assert "[run.changed]" in refused.error
    assert "stage more" in refused.error
    shutil.rmtree(tmp_path / "staged" / "3-more")
    assert "stage 3 of 3" in ok(jackfield("run", *staged("stages.grpo.schedule.until.samples=12")))
    assert [4, 3, 1] == [len(lines(tmp_path / "staged" / name)) for name in ("1-sft", "2-grpo", "3-more")]
