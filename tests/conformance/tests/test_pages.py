"""The pages that reports point to are there, and the table of checks is up to date."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from check_table import PAGE, page

from jackfield.plugins.registry import GROUPS as KINDS
from jackfield_conformance.registry import checks

ROOT = Path(__file__).resolve().parents[3]


def anchors(file: Path) -> set[str]:
    """The anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("kind", KINDS)
def test_reports_point_to_pages_that_exist(kind: str) -> None:
    known: dict[str, set[str]] = {}
    missing = []
    for each in checks(kind):
        path, _, anchor = each.page.partition("#")
        if path not in known:
            known[path] = anchors(ROOT / path)
        if anchor and anchor not in known[path]:
            missing.append((each.id, each.page))
    assert [] == missing


def test_the_table_of_checks_is_up_to_date() -> None:
    """Else: run tests/conformance/check_table.py."""
    assert page() == PAGE.read_text(encoding="utf-8")
