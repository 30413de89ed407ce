"""Which check of reward agents kills which mutant."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

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


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct agent passes every check."""
    harness.assert_reference_passes("reward", REFERENCE, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    """One fault is found by the checks that are for it."""
    harness.assert_killed("reward", REFERENCE, MUTANTS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    """The full matrix: no check is misled by the fault of another."""
    harness.assert_others_pass("reward", REFERENCE, MUTANTS[name], tmp_path)


def test_every_check_kills_a_mutant() -> None:
    """A check that nothing fails would prove nothing."""
    harness.assert_every_check_kills("reward", MUTANTS)
