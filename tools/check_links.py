"""Refuses committed symbolic links that leave the repository: they work on one machine only.

    python3 tools/check_links.py [FOLDER]

Standard library only.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def leaving(root: Path) -> list[str]:
    """Return a line for each link in the index of ``root`` with an absolute target, or one outside of ``root``."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage", "-z"], cwd=root, capture_output=True, text=True, check=True
    ).stdout
    links = [entry.partition("\t") for entry in listed.split("\0") if entry.startswith("120000 ")]
    return [
        f"{name}: a link to {target}; fix: git rm --cached {name}, or link to a relative path inside of the repository"
        for fields, _, name in links
        if not _inside(name, target := _target(root, fields.split()[1]))
    ]


def _target(root: Path, blob: str) -> str:
    return subprocess.run(
        ["git", "cat-file", "blob", blob], cwd=root, capture_output=True, text=True, check=True
    ).stdout


def _inside(name: str, target: str) -> bool:
    place = os.path.normpath(os.path.join(os.path.dirname(name), target))
    return not os.path.isabs(target) and place != ".." and not place.startswith("../")


if __name__ == "__main__":
    found = leaving(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent.parent)
    print("\n".join(found) or "no link leaves the repository")
    sys.exit(1 if found else 0)
