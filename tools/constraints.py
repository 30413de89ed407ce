"""Keeps ``constraints.txt``: the exact version of everything that the tools, the packages and their tests install.

.venv/bin/python tools/constraints.py           # write the versions that are installed in .venv
.venv/bin/python tools/constraints.py --check   # fail where an installed version is not the pinned one
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution

from packaging.requirements import Requirement

from environment import CONSTRAINTS, everything
from packages import discover, normalize

HEADER = """\
# The versions that are tested together; written by tools/constraints.py.
# torch comes first and has a pin of its own: a bare `torch` may bring gigabytes of CUDA packages.
"""


def main() -> None:
    """The command line."""
    found = pins(discover_requirements())
    lines = [f"{name}=={version}" for name, version in sorted(found.items(), key=lambda pin: (pin[0] != "torch", pin))]
    if "--check" not in sys.argv[1:]:
        CONSTRAINTS.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"wrote {len(lines)} versions to {CONSTRAINTS.name}")
        return
    pinned = {line.strip() for line in CONSTRAINTS.read_text(encoding="utf-8").splitlines()}
    wrong = [line for line in lines if line not in pinned]
    if wrong:
        sys.exit(
            "installed in .venv but not pinned so in constraints.txt:\n  "
            + "\n  ".join(wrong)
            + "\nfix: run tools/constraints.py and commit the file"
        )
    print(f"{len(lines)} versions are installed as pinned")


def discover_requirements() -> list[str]:
    """Everything that CI installs from outside the repository."""
    return everything(discover())


def pins(requirements: list[str]) -> dict[str, str]:
    """Name to installed version of ``requirements`` and of all that they need; local labels (``+cpu``) left out."""
    return {name: each.version.partition("+")[0] for name, each in closure_of(requirements).items()}


def closure_of(requirements: list[str]) -> dict[str, Distribution]:
    """The installed distributions that ``requirements`` reach in this environment."""
    reached: dict[str, Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    pending = [(Requirement(each), frozenset[str]()) for each in requirements]
    while pending:
        requirement, asked = pending.pop()
        extras = asked or frozenset({""})
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        key = (normalize(requirement.name), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            reached[key[0]] = distribution(requirement.name)
        except PackageNotFoundError:
            sys.exit(f"{requirement} is needed but not installed in {sys.prefix}")
        nested = reached[key[0]].requires or []
        pending += [(Requirement(each), frozenset(requirement.extras)) for each in nested]
    return reached


if __name__ == "__main__":
    main()
