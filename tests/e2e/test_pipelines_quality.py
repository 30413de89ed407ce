"""The benchmark of pipelines with one seed and few steps: each condition does to the training what its name says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(600)
def test_each_condition_changes_what_is_trained_on(tmp_path: Path) -> None:
    """Without failures no group teaches anything; diversity keeps entropy; each order gives other batches."""
    command = [
        sys.executable,
        "benchmarks/pipelines_quality.py",
        "--quick",
        "--json",
        "--folder",
        str(tmp_path / "runs"),
    ]
    command += ["--plot", str(tmp_path / "curves.png")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert 0 == done.returncode, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    order, failures, diversity = found["order of tasks"], found["failures"], found["diversity"]
    names = ("shuffled", "easy to hard", "hard to easy", "Thompson", "adaptive")
    assert {*names} == {*order}
    assert 5 == len({(order[name]["reward"], order[name]["entropy"]) for name in names}), "each order is another one"
    assert 1.0 == failures["dropped"]["reward"], "only what is right is left"
    assert failures["dropped"]["score"] == failures["dropped"]["mean score"], "it does not learn"
    assert failures["repaired"]["entropy"] != failures["shuffled"]["entropy"]
    assert diversity["diversity"]["entropy"] > diversity["shuffled"]["entropy"]
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
