"""Which check of agent loops kills which mutant."""

from __future__ import annotations

from collections.abc import Iterator

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


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("agent", REFERENCE, MUTANTS)
