"""What ``jackfield plugins new`` writes can be installed, is listed and passes the checks, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield_conformance.commands.new import available_kinds

JACKFIELD = (sys.executable, "-c", "from jackfield.cli import main; main(prog_name='jackfield')")


def run(folder: Path, *command: str) -> str:
    """Run a command to its end in ``folder``, with what is installed in ``folder/site``; its output."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "site"),
        "JACKFIELD_CERTIFICATES": str(folder / "certificates"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=400, check=False
    )
    assert 0 == done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", available_kinds())
def test_a_scaffold_is_certified_at_birth(kind: str, tmp_path: Path) -> None:
    """Written, built and installed by pip, listed, its own tests run, checked, and listed as certified."""
    run(tmp_path, *JACKFIELD, "plugins", "new", kind, "newborn")
    project = tmp_path / f"jackfield-{kind}-newborn"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    run(tmp_path, *pip, str(project))
    own = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(project))
    run(tmp_path, *own, str(project / "tests"))
    assert "WARNING" not in run(tmp_path, *JACKFIELD, "plugins", "check", "newborn")
    [row] = [
        row for row in json.loads(run(tmp_path, *JACKFIELD, "plugins", "list", "--json")) if row["name"] == "newborn"
    ]
    assert (kind, "ok") == (row["kind"], row["status"])
    assert "full" == row["certified"]["level"]


@pytest.mark.timeout(300)
def test_a_wheel_brings_its_certificate_along(tmp_path: Path) -> None:
    """Published with the certificate in it, a plugin is certified wherever it is installed; changed, it is not."""
    run(tmp_path, *JACKFIELD, "plugins", "new", "reward", "newborn")
    project = tmp_path / "jackfield-reward-newborn"
    package = "jackfield_reward_newborn"
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--target", "site")
    run(tmp_path, *pip, str(project))
    certificate = project / "src" / package / "certificate.json"
    run(tmp_path, *JACKFIELD, "plugins", "check", "newborn", "--certificate", str(certificate))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    run(elsewhere, *pip, str(project))
    assert "shipped" == certified(elsewhere)["source"]
    file = elsewhere / "site" / package / "reward.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert certified(elsewhere) is None


def certified(folder: Path) -> Any:
    """What ``plugins list`` says of the newborn plugin's certificate."""
    rows = json.loads(run(folder, *JACKFIELD, "plugins", "list", "--json"))
    return next(row["certified"] for row in rows if row["name"] == "newborn")
