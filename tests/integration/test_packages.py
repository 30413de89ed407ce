"""Every package is a complete project of its own, and its wheel has what a user of it needs."""

from __future__ import annotations

import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from packages import ROOT, Package, discover

#: in each readme that has a package installed with pip, as long as no index has them
WHERE_PIP_LOOKS = (
    "No package index has Jackfield's packages yet; `docs/guides/install.md` says how `pip install` finds them."
)
every_package = pytest.mark.parametrize("package", discover().values(), ids=discover().keys())


@every_package
def test_folder_is_complete(package: Package) -> None:
    """Metadata, readme, changelog and licence are there, and the changelog knows the version."""
    project = tomllib.loads((package.folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert (">=3.11", "Apache-2.0", "README.md") == (project["requires-python"], project["license"], project["readme"])
    assert f"\n## {package.version}" in (package.folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (ROOT / "LICENSE").read_bytes() == (package.folder / "LICENSE").read_bytes()
    assert (package.folder / "README.md").stat().st_size > 0
    assert package.tests.is_dir()


@every_package
def test_a_readme_says_how_pip_finds_the_package(package: Package) -> None:
    lines = (package.folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert any("pip install jackfield" in line.replace("'", "") for line in lines) == (WHERE_PIP_LOOKS in lines)
    assert "No package index has Jackfield's packages yet" in (ROOT / "docs/guides/install.md").read_text("utf-8")


@every_package
def test_wheel_is_complete(package: Package, wheels: dict[str, Path]) -> None:
    """A wheel holds one import package, with its type marker, its manifests and the licence."""
    with zipfile.ZipFile(wheels[package.name]) as wheel:
        names = set(wheel.namelist())
        metadata = Parser().parsestr(wheel.read(f"{package.import_name}-{package.version}.dist-info/METADATA").decode())
    info = f"{package.import_name}-{package.version}.dist-info"
    assert {package.import_name, info} == {name.partition("/")[0] for name in names}
    sources = {str(file.relative_to(package.source)) for file in package.source.rglob("*") if file.is_file()}
    assert {name for name in sources if "__pycache__" not in name} <= names
    assert f"{package.import_name}/py.typed" in names
    assert f"{info}/licenses/LICENSE" in names
    assert "Apache-2.0" == metadata["License-Expression"]
    assert ">=3.11" == metadata["Requires-Python"]
