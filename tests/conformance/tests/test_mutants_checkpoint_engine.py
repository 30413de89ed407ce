"""Which check of checkpoint engines kills which mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mutants import harness
from mutants.checkpoint_engine import CHILDREN, MUTANTS, REFERENCE, SHARED

from jackfield_conformance.support import checkpoint_engine as support


@pytest.fixture(autouse=True)
def _short_deadlines_and_no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A mutant that waits forever is not waited for long, and what one leaves does not outlive its test."""
    monkeypatch.setattr(support, "PATIENCE_SECONDS", 2.0)
    monkeypatch.setattr(support, "GRACE_SECONDS", 1.0)
    yield
    while CHILDREN:
        left = CHILDREN.pop()
        left.kill()
        left.wait(10)
    while SHARED:
        SHARED.popitem()[0].unlink()


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct engine passes every check."""
    harness.assert_reference_passes("checkpoint_engine", REFERENCE, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    """One fault is found by the checks that are for it."""
    harness.assert_killed("checkpoint_engine", REFERENCE, MUTANTS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    """The full matrix: no check is misled by the fault of another."""
    harness.assert_others_pass("checkpoint_engine", REFERENCE, MUTANTS[name], tmp_path)


def test_every_check_kills_a_mutant() -> None:
    """A check that nothing fails would prove nothing."""
    harness.assert_every_check_kills("checkpoint_engine", MUTANTS)
