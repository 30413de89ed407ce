"""Which check of checkpoint engines kills which mutant."""

from __future__ import annotations

from collections.abc import Iterator

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


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("checkpoint_engine", REFERENCE, MUTANTS)
