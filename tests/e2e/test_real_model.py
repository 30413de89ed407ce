"""A real model and real problems: two steps of each of the example's runs."""

from __future__ import annotations

import importlib.util
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import click
import pytest

from jackfield.config import load_config
from jackfield_commands import CommandServer
from jackfield_testing import SMOLLM2

from .conftest import ROOT, metrics

EXAMPLE = ROOT / "examples" / "real_model"
SMALL = [
    "schedule.steps=2",
    "evaluation.every=0",
    "data.groups_per_batch=2",
    "data.rollouts_per_group=4",
    "sampling.max_new_tokens=24",
]


@pytest.mark.needs("smollm2")
@pytest.mark.needs_data("gsm8k")
@pytest.mark.timeout(600)
def test_two_steps_of_each(jackfield: CommandServer, tmp_path: Path, shared_data: Path) -> None:
    """The model is one that knows English: its loss on demonstrations is below 2, that of a random one is 10.8."""
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "model").symlink_to(SMOLLM2)

    arguments = (
        str(EXAMPLE / "real_model.py"),
        "--data",
        str(shared_data / "gsm8k"),
        "--folder",
        str(tmp_path),
        *SMALL,
    )
    done = jackfield.start(*arguments, program="python", folder=tmp_path).wait(500)
    assert 0 == done.code, done.out[-4000:] + done.error[-4000:]
    assert "learning curve" in done.out
    tuned, trained = ([line for line in metrics(tmp_path / run) if line["kind"] == "step"] for run in ("sft", "grpo"))
    assert [[1, 2], [1, 2]] == [[line["step"] for line in lines] for lines in (tuned, trained)]
    assert all(line["policy/loss"] < 2 for line in tuned)
    assert all(line["log_prob_check/rollout/max"] < 0.1 for line in trained if "log_prob_check/rollout/max" in line)
    adapter = json.loads((tmp_path / "grpo" / "model" / "adapter_config.json").read_text())
    assert 16 == adapter["r"]


@pytest.fixture
def make_task(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example's module."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    spec = importlib.util.spec_from_file_location("jackfield_example_gsm8k", EXAMPLE / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_data_is_downloaded_once_and_checked(
    make_task: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, data = tmp_path / "source", tmp_path / "data"
    source.mkdir()
    monkeypatch.setattr(make_task, "SOURCE", source.as_uri())
    files = {"train.jsonl": b"one", "test.jsonl": b"two"}
    monkeypatch.setattr(make_task, "FILES", {name: sha256(text).hexdigest() for name, text in files.items()})
    with pytest.raises(click.ClickException, match="cannot be read"):
        make_task.get_data(data)
    for name, text in files.items():
        (source / name).write_bytes(text)
    make_task.get_data(data)
    assert files == {file.name: file.read_bytes() for file in data.iterdir()}
    (source / "test.jsonl").write_bytes(b"three")
    make_task.get_data(data)  # they are there
    (data / "test.jsonl").unlink()
    with pytest.raises(click.ClickException, match="has changed"):
        make_task.get_data(data)
    assert ["train.jsonl"] == [file.name for file in data.iterdir()]


@pytest.mark.parametrize("file", sorted(EXAMPLE.glob("*.yaml")), ids=lambda file: file.stem)
def test_every_file_of_the_example_is_valid(file: Path) -> None:
    assert load_config(file, ())
