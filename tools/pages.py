"""Pages of the documentation that a tool writes: the command line of each ``*_reference.py``."""

from __future__ import annotations

import sys
from pathlib import Path

from packages import ROOT


def write_or_check(page: Path, text: str, shows: str) -> None:
    """Write a page; with ``--check``, exit with an error where it is not what would be written.

    Args:
        page: in the repository.
        text: the page's content.
        shows: what the page does when it is up to date, for the message.
    """
    name = page.relative_to(ROOT)
    if "--check" not in sys.argv[1:]:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(text, encoding="utf-8")
        print(f"wrote {name}")
    elif not page.is_file() or page.read_text(encoding="utf-8") != text:
        sys.exit(f"{name} is out of date; fix: run tools/{Path(sys.argv[0]).name} and commit the page")
    else:
        print(f"{name} {shows}")
