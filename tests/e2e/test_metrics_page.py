"""Every metric of a run is on the page of metrics, and what the page promises of every run is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
#: A part of a name in capitals stands for any.
ANY = re.compile(r"[A-Z]{2,}|\bN\b")


def rows() -> dict[str, str]:
    """The names on the page, and when each is there."""
    found = {}
    lines = [line.strip("|").split("|") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:3] == "| `"]
    for names, _, when, _ in lines:  # name, unit, when it is there, meaning
        for name in re.findall(r"`(.+?)`", names):
            assert name not in found, f"{name} is on the page twice"
            found[name] = when.strip()
    return found


@pytest.mark.parametrize(
    ("promised", "file", "overrides"),
    [
        ({"always", "rewards", "rollouts"}, "grpo.yaml", ("evaluation.every=1", "schedule.steps=2")),
        ({"always", "rewards", "rollouts"}, "grpo.yaml", ("schedule.mode=async", "algorithm.kl.measure=true")),
        ({"always"}, "warmup.yaml", ()),
    ],
    ids=["synchronous", "asynchronous", "offline"],
)
def test_the_page_and_a_run_agree(promised: set[str], file: str, overrides: tuple[str, ...], small_run: Any) -> None:
    _, lines = small_run("page", *overrides, file=file)
    page = rows()
    patterns = [re.compile(ANY.sub(".+", re.escape(name))) for name in page]
    names = {name for line in lines if line["kind"] == "step" for name in line} - {"kind", "step", "time", "not_finite"}
    assert [] == sorted(name for name in names if not any(each.fullmatch(name) for each in patterns))
    missing = [name for name, when in page.items() if when in promised and not ANY.search(name)]
    assert [] == sorted(set(missing) - names)
