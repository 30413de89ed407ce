"""The packages of this repository, found by their pyproject.toml files.

Standard library only: it is also read by the interpreter that makes the first virtual environment.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Where packages may live; a new plugin joins by being there.
PLACES = ("core", "plugins/*/*", "tests/conformance")

#: A package's tests run with these extras installed, where it has them.
TEST_EXTRAS = ("distributed", "profile", "ray", "train", "test")

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[([^\]]*)\])?")


@dataclasses.dataclass(frozen=True)
class Package:
    """One package: what its pyproject.toml says."""

    name: str  #: of the distribution, normalized
    version: str
    folder: Path
    requires: tuple[str, ...]
    extras: dict[str, tuple[str, ...]]

    @property
    def import_name(self) -> str:
        """The one package in its ``src`` folder."""
        return self.name.replace("-", "_")

    @property
    def source(self) -> Path:
        """The folder that holds the import package."""
        return self.folder / "src"

    @property
    def tests(self) -> Path:
        """The folder of its tests; it need not exist."""
        return self.folder / "tests"

    @property
    def wheel(self) -> Path:
        """Where its wheel is built."""
        return ROOT / "dist" / f"{self.import_name}-{self.version}-py3-none-any.whl"

    @property
    def test_extras(self) -> frozenset[str]:
        """The extras that its tests need."""
        return frozenset(self.extras) & frozenset(TEST_EXTRAS)


def discover(root: Path = ROOT) -> dict[str, Package]:
    """All packages by name, the core first."""
    files = [file for place in PLACES for file in sorted(root.glob(f"{place}/pyproject.toml"))]
    found = [_read(file) for file in files]
    names = [package.name for package in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SystemExit(f"two packages of the repository have the same name: {', '.join(twice)}")
    return dict(zip(names, found, strict=True))


def closure(packages: dict[str, Package], wanted: dict[str, frozenset[str]]) -> dict[str, frozenset[str]]:
    """The packages of the repository that ``wanted`` needs, itself included.

    Args:
        packages: what :func:`discover` found.
        wanted: name to the extras that are to be installed.

    Returns:
        Name to extras, for everything that ``wanted`` reaches through requirements.
    """
    reached: dict[str, frozenset[str]] = {}
    pending = list(wanted.items())
    while pending:
        name, extras = pending.pop()
        if name in reached and extras <= reached[name]:
            continue
        reached[name] = reached.get(name, frozenset()) | extras
        pending += [
            (requirement_name(each), _extras(each))
            for each in _requirements(packages[name], reached[name])
            if requirement_name(each) in packages
        ]
    return {name: reached[name] for name in packages if name in reached}


def third_party(packages: dict[str, Package], wanted: dict[str, frozenset[str]]) -> list[str]:
    """The requirements of ``wanted`` and of all it reaches that come from outside the repository."""
    needed = {
        each
        for name, extras in closure(packages, wanted).items()
        for each in _requirements(packages[name], extras)
        if requirement_name(each) not in packages
    }
    return sorted(needed)


def sources(packages: dict[str, Package]) -> list[str]:
    """The ``src`` folders, relative to the root."""
    return [str(package.source.relative_to(ROOT)) for package in packages.values() if package.source.is_dir()]


def requirement_name(requirement: str) -> str:
    """The normalized name in a requirement such as ``torch>=2.8``."""
    match = _REQUIREMENT.match(requirement)
    if match is None:
        raise SystemExit(f"not a requirement: {requirement!r}")
    return normalize(match[1])


def normalize(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _extras(requirement: str) -> frozenset[str]:
    match = _REQUIREMENT.match(requirement)
    names = (match[2] or "") if match else ""
    return frozenset(normalize(extra) for extra in names.split(",") if extra.strip())


def _requirements(package: Package, extras: frozenset[str]) -> list[str]:
    unknown = extras - set(package.extras)
    if unknown:
        raise SystemExit(f"{package.name} has no extra {', '.join(sorted(unknown))}")
    return [*package.requires, *(each for extra in sorted(extras) for each in package.extras[extra])]


def _read(file: Path) -> Package:
    project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    optional = project.get("optional-dependencies", {})
    return Package(
        name=normalize(project["name"]),
        version=project["version"],
        folder=file.parent,
        requires=tuple(project.get("dependencies", ())),
        extras={normalize(name): tuple(each) for name, each in optional.items()},
    )
