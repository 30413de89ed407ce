"""What ``jackfield plugins new`` writes can be installed, is listed and passes the checks, unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.abc import KINDS
from jackfield_commands import CommandServer

Do = Callable[..., str]


@pytest.fixture
def do(jackfield: CommandServer) -> Do:
    """Run a command to its end in ``folder``, with what is installed in ``folder/site``; its output."""

    def run(folder: Path, *arguments: str, program: str = "jackfield") -> str:
        environment = {"PYTHONPATH": str(folder / "site"), "JACKFIELD_CERTIFICATES": str(folder / "certificates")}
        done = jackfield(*arguments, environment=environment, folder=folder, program=program, seconds=400)
        assert 0 == done.code, done.out + done.error
        return done.out

    return run


def install(folder: Path, project: Path) -> None:
    """Let pip build a project and install it into ``folder/site``."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    command += ["--disable-pip-version-check", "--target", "site", str(project)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert 0 == done.returncode, done.stdout + done.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*KINDS, "algorithm"])
def test_a_scaffold_is_certified_at_birth(kind: str, tmp_path: Path, do: Do) -> None:
    """Written, built and installed by pip, listed, its own tests run, checked, and listed as certified."""
    (tmp_path / "certificates").mkdir()
    do(tmp_path, "plugins", "new", kind, "newborn")
    project = tmp_path / f"jackfield-{kind}-newborn"
    kind = "hooks" if kind == "algorithm" else kind
    install(tmp_path, project)
    if kind == "hooks":
        assert "origin: jackfield-algorithm-newborn 0.1.0" in do(tmp_path, "algorithms", "show", "newborn")
        assert "ok      hooks 'newborn'" in do(tmp_path, "plugins", "doctor", "newborn")
    own = ("-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(project), str(project / "tests"))
    do(tmp_path, *own, program="pytest")
    certificate = str(tmp_path / "certificates" / f"{kind}-newborn.json")
    check = ("--plugin", f"{kind}:newborn", "--certificate", certificate)
    assert "WARNING" not in do(tmp_path, *check, program="jackfield_conformance")
    [row] = [row for row in json.loads(do(tmp_path, "plugins", "list", "--json")) if row["name"] == "newborn"]
    assert (kind, "ok") == (row["kind"], row["status"])
    assert "full" == row["certified"]["level"]


@pytest.mark.timeout(300)
def test_a_wheel_brings_its_certificate_along(tmp_path: Path, do: Do) -> None:
    """Published with the certificate in it, a plugin is certified wherever it is installed; changed, it is not."""
    do(tmp_path, "plugins", "new", "reward", "newborn")
    project = tmp_path / "jackfield-reward-newborn"
    package = "jackfield_reward_newborn"
    install(tmp_path, project)
    certificate = project / "src" / package / "certificate.json"
    do(tmp_path, "plugins", "check", "newborn", "--certificate", str(certificate))
    assert "local" == certified(tmp_path, do)["source"]
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    install(elsewhere, project)
    assert "shipped" == certified(elsewhere, do)["source"]
    file = elsewhere / "site" / package / "reward.py"
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert certified(elsewhere, do) is None


def certified(folder: Path, do: Do) -> Any:
    """What ``plugins list`` says of the newborn plugin's certificate."""
    rows = json.loads(do(folder, "plugins", "list", "--json"))
    return next(row["certified"] for row in rows if row["name"] == "newborn")
