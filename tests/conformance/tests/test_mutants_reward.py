"""Which check of reward agents kills which mutant."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator

import pytest
from mutants import harness
from mutants.reward import LEAKED, MUTANTS, REFERENCE

from jackfield_conformance.suites import reward


@pytest.fixture(autouse=True)
def _short_grace_and_no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a mutant leaves running is not waited for long, and does not outlive its test."""
    monkeypatch.setattr(reward, "_GRACE", 0.5)
    monkeypatch.setattr(reward, "_SLOW_DEADLINE", 0.2)
    yield
    while LEAKED:
        left = LEAKED.pop()
        if isinstance(left, subprocess.Popen):
            left.kill()
            left.wait(10)
        elif isinstance(left, socket.socket):
            left.close()


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("reward", REFERENCE, MUTANTS)
