"""Which check of agent loops kills which mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants import harness
from mutants.agent import LEAKED, MUTANTS, REFERENCE

from jackfield_conformance.support import agent


@pytest.fixture(autouse=True)
def _short_grace_and_no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a mutant leaves running is not waited for long, and does not outlive its test."""
    monkeypatch.setattr(agent, "GRACE_SECONDS", 0.5)
    yield
    while LEAKED:
        left = LEAKED.pop()
        left.kill()
        left.wait(10)


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct loop passes every check."""
    harness.assert_reference_passes("agent", REFERENCE, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    """One fault is found by the checks that are for it."""
    harness.assert_killed("agent", REFERENCE, MUTANTS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    """The full matrix: no check is misled by the fault of another."""
    harness.assert_others_pass("agent", REFERENCE, MUTANTS[name], tmp_path)


def test_every_check_kills_a_mutant() -> None:
    """A check that nothing fails would prove nothing."""
    harness.assert_every_check_kills("agent", MUTANTS)
