"""The core and any subset of plugins install from built wheels into a clean environment, and are found there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from environment import UV, installer_settings
from packages import ROOT, Package

GROUPS = {
    "jackfield.engines": "engine",
    "jackfield.rollouts": "rollout",
    "jackfield.agents": "agent",
    "jackfield.rewards": "reward",
    "jackfield.transfer_queues": "transfer_queue",
    "jackfield.checkpoint_engines": "checkpoint_engine",
    "jackfield.operators": "operator",
    "jackfield.hooks": "hooks",
}


LIGHT = ["jackfield-user-code", "jackfield-reward-rules", "jackfield-agent-single-turn"]


def provided(package: Package) -> set[tuple[str, str]]:
    """Kind and name of the plugins that a package's entry points promise."""
    project = tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project.get("entry-points", {})
    return {(kind, name) for group, kind in GROUPS.items() for name in points.get(group, {})}


def install(folder: Path, wheels: list[Path], installer: str) -> Path:
    """A clean environment with these wheels and, from the package index, what they require; its ``bin`` folder."""
    venv.create(folder, with_pip=False)
    python = str(folder / "bin" / "python")
    commands = {
        "pip": [sys.executable, "-m", "pip", "--python", python, "install", "--no-compile"],
        "uv": [str(UV), "pip", "install", "--python", python],
    }
    command = [*commands[installer], "--quiet", "--constraint", str(ROOT / "constraints.txt"), *map(str, wheels)]
    variables = {**os.environ, **installer_settings()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env=variables)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("names", "torch", "installer"),
    [
        pytest.param([], False, "pip", id="core alone"),
        pytest.param(LIGHT, False, "pip", id="light plugins"),
        pytest.param(None, True, "uv", id="all packages"),
    ],
)
def test_subset_installs_and_is_listed(
    tmp_path: Path,
    packages: dict[str, Package],
    wheels: dict[str, Path],
    names: list[str] | None,
    torch: bool,
    installer: str,
) -> None:
    """`plugins list` shows what was installed and nothing else; torch comes only with a package that requires it."""
    chosen = ["jackfield", *(list(packages)[1:] if names is None else names)]
    programs = install(tmp_path / "venv", [wheels[name] for name in chosen], installer)

    listing = subprocess.run(
        [programs / "jackfield", "plugins", "list", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = json.loads(listing.stdout)
    assert set().union(*(provided(packages[name]) for name in chosen)) == {(row["kind"], row["name"]) for row in rows}
    assert {"ok"} == {row["status"] for row in rows}

    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    found = subprocess.run([programs / "python", "-c", probe], capture_output=True, text=True, check=True)
    assert str(torch) == found.stdout.strip()
