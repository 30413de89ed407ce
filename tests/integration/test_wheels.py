"""The core and any subset of plugins install from built wheels into a clean environment, and are found there."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from packages import ROOT, Package

GROUPS = {
    "jackfield.engines": "engine",
    "jackfield.rollouts": "rollout",
    "jackfield.agents": "agent",
    "jackfield.rewards": "reward",
    "jackfield.transfer_queues": "transfer_queue",
    "jackfield.checkpoint_engines": "checkpoint_engine",
}


def provided(package: Package) -> set[tuple[str, str]]:
    """Kind and name of the plugins that a package's entry points promise."""
    project = tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project.get("entry-points", {})
    return {(kind, name) for group, kind in GROUPS.items() for name in points.get(group, {})}


def install(folder: Path, wheels: list[Path]) -> Path:
    """A clean environment with these wheels and, from the package index, what they require; its ``bin`` folder."""
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile"]
    pip += ["--constraint", str(ROOT / "constraints.txt")]
    done = subprocess.run([*pip, *map(str, wheels)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return python.parent


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("names", "torch"),
    [
        pytest.param([], False, id="core alone"),
        pytest.param(["jackfield-reward-rules", "jackfield-agent-single-turn"], False, id="light plugins"),
        pytest.param(None, True, id="all packages"),
    ],
)
def test_subset_installs_and_is_listed(
    tmp_path: Path, packages: dict[str, Package], wheels: dict[str, Path], names: list[str] | None, torch: bool
) -> None:
    """`plugins list` shows what was installed and nothing else; torch comes only with a package that requires it."""
    chosen = ["jackfield", *(list(packages)[1:] if names is None else names)]
    programs = install(tmp_path / "venv", [wheels[name] for name in chosen])

    listing = subprocess.run(
        [programs / "jackfield", "plugins", "list", "--json"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    rows = json.loads(listing.stdout)
    assert set().union(*(provided(packages[name]) for name in chosen)) == {(row["kind"], row["name"]) for row in rows}
    assert {"ok"} == {row["status"] for row in rows}

    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    found = subprocess.run([programs / "python", "-c", probe], capture_output=True, text=True, check=True)
    assert str(torch) == found.stdout.strip()
