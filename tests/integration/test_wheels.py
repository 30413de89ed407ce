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
    "names",
    [
        pytest.param([], id="core alone"),
        pytest.param(["jackfield-reward-rules", "jackfield-agent-single-turn"], id="light plugins"),
    ],
)
def test_subset_installs_and_is_listed(
    tmp_path: Path, packages: dict[str, Package], wheels: dict[str, Path], names: list[str]
) -> None:
    """`plugins list` shows what was installed and nothing else; torch comes only with a package that requires it."""
    chosen = ["jackfield", *names]
    programs = install(tmp_path / "venv", [wheels[name] for name in chosen])
    assert set().union(*(provided(packages[name]) for name in chosen)) == listed(programs)
    probe = "import importlib.util as u; print(u.find_spec('torch') is not None)"
    found = subprocess.run([programs / "python", "-c", probe], capture_output=True, text=True, check=True)
    assert "False" == found.stdout.strip()


def test_all_packages_go_together(packages: dict[str, Package]) -> None:
    """They are all installed in this environment. Each alone, with what it requires, is in an environment of tox."""
    check = [sys.executable, "-m", "pip", "check"]
    done = subprocess.run(check, capture_output=True, text=True, timeout=60, check=False)
    assert 0 == done.returncode, done.stdout
    assert set().union(*map(provided, packages.values())) <= listed(Path(sys.executable).parent)


def listed(programs: Path) -> set[tuple[str, str]]:
    """Kinds and names of the plugins of an environment, all of which are in order."""
    command = [str(programs / "jackfield"), "plugins", "list", "--json"]
    listing = subprocess.run(command, cwd=programs, capture_output=True, text=True, check=True)
    rows = json.loads(listing.stdout)
    assert {"ok"} == {row["status"] for row in rows}
    return {(row["kind"], row["name"]) for row in rows}
