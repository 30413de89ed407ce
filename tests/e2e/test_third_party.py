"""``examples/third_party``: somebody else's agent and reward, installed by pip, certified, and used in a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import QUICKSTART, ROOT, metrics

PROJECT = ROOT / "examples" / "third_party"
JACKFIELD = (sys.executable, "-c", "from jackfield.cli import main; main(prog_name='jackfield')")


def run(folder: Path, *command: str) -> str:
    """Run a command to its end with what is installed in ``folder/site``; its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "site"),
        "JACKFIELD_CERTIFICATES": str(folder / "certificates"),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert 0 == done.returncode, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def test_both_together_have_sixty_lines() -> None:
    lines = [line for file in (PROJECT / "src").rglob("*.py") for line in file.read_text().splitlines() if line.strip()]
    assert 60 >= len(lines)


@pytest.mark.timeout(300)
def test_installed_certified_and_used(tmp_path: Path, made: Path) -> None:
    """No file of Jackfield's names them; the configuration does."""
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    run(tmp_path, *pip, str(PROJECT))
    for name in ("patient", "consoling"):
        run(tmp_path, *JACKFIELD, "plugins", "check", name)
    rows = {row["name"]: row for row in json.loads(run(tmp_path, *JACKFIELD, "plugins", "list", "--json"))}
    assert ["full", "full"] == [rows[name]["certified"]["level"] for name in ("patient", "consoling")]
    overrides = [
        f"folder={tmp_path / 'run'}",
        f"model.path={made / 'model'}",
        f"data.train={made / 'problems.jsonl'}",
        "agent.name=patient",
        "reward={name: consoling, consolation: 0.1}",
        "data.groups_per_batch=4",
        "data.rollouts_per_group=4",
        "sampling.max_new_tokens=6",
        "schedule.steps=3",
        "evaluation.every=0",
        "observe.progress=false",
        "observe.curve=false",
        "observe.report_to=[]",
    ]
    run(tmp_path, *JACKFIELD, "run", str(QUICKSTART / "grpo.yaml"), *overrides)
    assert 3 == sum(line["kind"] == "step" for line in metrics(tmp_path / "run"))
