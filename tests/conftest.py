"""Fixtures of the tests that are about the repository as a whole.

What all packages' tests share, the data folder and the rule about skips, is in ``tools/testing/jackfield_testing.py``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

from packages import Package, discover  # noqa: E402, after the path is set


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
