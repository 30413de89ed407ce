"""Which check of agent loops kills which mutant."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants import agent_faults, agent_features, harness
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
    _,
) = harness.make_tests("agent", REFERENCE, MUTANTS)

(
    test_the_reference_of_1_1_passes,
    test_each_mutant_of_1_1_fails_its_checks,
    test_no_other_check_fails_on_mutants_of_1_1,
    _,
) = harness.make_tests("agent", agent_features.REFERENCE, agent_faults.MUTANTS)


def test_the_reference_with_one_conversation_passes(tmp_path: Path) -> None:
    harness.assert_reference_passes("agent", agent_features.ONE_CONVERSATION, tmp_path)


def test_every_check_is_killed_by_a_mutant() -> None:
    """Each check can fail."""
    harness.assert_every_check_kills("agent", {**MUTANTS, **agent_faults.MUTANTS})
