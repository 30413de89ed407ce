"""Which check of reward agents kills which mutant."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants import harness
from mutants.reward import LEAKED, MUTANTS, REFERENCE, ProcessGoesOn

from jackfield_conformance.support import reward


@pytest.fixture(autouse=True)
def _short_grace_and_no_leaks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a mutant leaves running is not waited for long, and does not outlive its test."""
    monkeypatch.setattr(reward, "GRACE", 0.5)
    monkeypatch.setattr(reward, "SLOW_DEADLINE", 0.2)
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


def test_a_process_of_others_that_ends_meanwhile_hides_no_leak(tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "60"])
    LEAKED.append(other)

    class EndsAnother(ProcessGoesOn):
        async def slow(self) -> None:
            other.kill()
            other.wait(10)
            await super().slow()

    mutant = harness.Mutant(cls=EndsAnother, killed_by=("REW-017",), what="a process goes on, and another one ends")
    harness.assert_killed("reward", REFERENCE, mutant, tmp_path)
