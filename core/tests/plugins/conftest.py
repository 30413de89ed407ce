"""Fake installed distributions: a package beside a ``.dist-info`` in a folder of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

GOOD_REWARD = """
from jackfield.abc.reward import RewardAgent, ScoreResult

class Agent(RewardAgent):
    async def compute_score(self, request):
        return ScoreResult(score=self.config.scale)
"""
GOOD_CONFIG = """
import attrs

@attrs.frozen
class Config:
    scale: float = 1.0
"""


class Site:
    """A folder of fake distributions."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def install(
        self,
        name: str = "good",
        *,
        kind: str = "reward",
        package: str | None = None,
        distribution: str | None = None,
        version: str = "0.1.0",
        manifest: str | None = None,
        extra: str = "",
        abi: str = "1.0",
        group: str | None = None,
        value: str | None = None,
        modules: Mapping[str, str] = {},
    ) -> str:
        """Install a plugin; returns its import package. ``modules`` replaces or adds files of the package."""
        package = package or f"fake_{name.replace('-', '_')}"
        distribution = distribution or f"dist-{package.replace('_', '-')}"
        if manifest is None:
            manifest = textwrap.dedent(f"""
                name = "{name}"
                kind = "{kind}"
                abi = "{abi}"
                object = "{package}.plugin:Agent"
                config = "{package}.config:Config"
                description = "a fake"
            """) + textwrap.dedent(extra)
        files = {
            "__init__.py": "",
            "config.py": GOOD_CONFIG,
            "plugin.py": GOOD_REWARD,
            "plugin.toml": manifest,
            **modules,
        }
        folder = self.folder / package
        folder.mkdir(parents=True, exist_ok=True)
        for file, content in files.items():
            (folder / file).write_text(textwrap.dedent(content))
        info = self.folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        entry = f"{name} = {value or f'{package}:plugin.toml'}"
        (info / "entry_points.txt").write_text(f"[{group or f'jackfield.{kind}s'}]\n{entry}\n")
        return package

    def environment(self, **variables: str) -> dict[str, str]:
        """For children that shall see the fakes."""
        path = os.pathsep.join(filter(None, [str(self.folder), os.environ.get("PYTHONPATH")]))
        return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run this interpreter with the fakes installed."""
        return subprocess.run(
            [sys.executable, *arguments],
            env=self.environment(**variables),
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    def cli(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``jackfield`` with the fakes installed."""
        return self.run("-c", "from jackfield.cli import main; main(prog_name='jackfield')", *arguments, **variables)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """An empty site that this process imports from, too."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    yield Site(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
