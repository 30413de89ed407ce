"""Fixtures of the tests that are about the repository as a whole.

What all packages' tests share, the data folder and the rule about skips, is in ``tools/testing/jackfield_testing.py``.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
QUICKSTART = ROOT / "examples" / "quickstart"
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tools" / "testing")]

from jackfield_commands import CommandServer  # noqa: E402, after the path is set
from jackfield_ray_forks import write_interpreter  # noqa: E402
from packages import Package, discover  # noqa: E402


@pytest.fixture(scope="session")
def packages() -> dict[str, Package]:
    """The packages of the repository, by name."""
    return discover()


@pytest.fixture(scope="session")
def wheels(packages: dict[str, Package]) -> dict[str, Path]:
    """The built wheel of each package; skips where one is missing or older than its sources."""
    for package in packages.values():
        if not package.wheel.is_file():
            pytest.skip(f"{package.wheel.relative_to(ROOT)} is not built: make wheels")
        built = package.wheel.stat().st_mtime
        newer = [file for file in _sources(package) if file.stat().st_mtime > built]
        if newer:
            pytest.skip(f"{package.wheel.name} is older than {newer[0].relative_to(ROOT)}: make wheels")
    return {name: package.wheel for name, package in packages.items()}


def _sources(package: Package) -> list[Path]:
    files = [file for file in package.source.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    return [package.folder / "pyproject.toml", *files]


@pytest.fixture(scope="session")
def make_task_module() -> ModuleType:
    """``examples/quickstart/make_task.py``."""
    spec = importlib.util.spec_from_file_location("quickstart_make_task", QUICKSTART / "make_task.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def made(make_task_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's files: three sets of problems, and a model that knows nothing."""
    folder = tmp_path_factory.mktemp("made")
    make_task_module.make_task(folder, seed=5, sizes={"held_out": 64, "demonstrations": 1200, "problems": 200})
    return folder


@pytest.fixture(scope="session")
def ray_interpreters(jackfield: CommandServer) -> Iterator[str]:
    """A setting with which a run's workers in Ray have imported torch when they start: see ``jackfield_ray_forks``."""
    folder = Path(tempfile.mkdtemp(prefix="jackfield"))  # the path of a socket is short
    command = jackfield.start(str(folder / "workers"), program="ray workers")
    try:
        while "listens" not in command.out:
            assert command.running, command.error
            time.sleep(0.01)
        python = write_interpreter(folder, folder / "workers")
        kinds = ("engine", "rollout", "agent", "reward")
        yield f"cluster.interpreters={{{', '.join(f'{kind}: {python}' for kind in kinds)}}}"
    finally:
        command.kill()
        shutil.rmtree(folder)


@pytest.fixture
def quickstart_settings(made: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """``quickstart_settings("folder name", "key=value", ...)``: arguments of ``jackfield run`` for a run of seconds."""

    def settings(name: str, *overrides: str) -> list[str]:
        return [
            str(QUICKSTART / "grpo.yaml"),
            f"name={name}",
            f"folder={tmp_path / name}",
            f"model.path={made / 'model'}",
            f"data.train={made / 'problems.jsonl'}",
            f"data.eval={made / 'held_out.jsonl'}",
            "data.groups_per_batch=4",
            "data.rollouts_per_group=4",
            "sampling.max_new_tokens=6",
            "schedule.steps=3",
            "evaluation.every=0",
            "cluster.threads=1",
            "observe.progress=false",
            "observe.curve=false",
            "observe.report_to=[]",
            *overrides,
        ]

    return settings
