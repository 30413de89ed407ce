"""Make ``mutants`` importable for the tests here, which are not part of the wheel, and shorten waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jackfield_conformance.support import processes

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def _short_wait_for_leaked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that a mutant leaves on purpose never ends."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", 0.5)
