"""The suite of rollout servers is tested: each mutant is killed by the checks that it names, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mutants import harness
from mutants.rollout import MUTANTS, REFERENCE

from jackfield_conformance.support import rollout

KIND = "rollout"


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mutant never does is not waited for long; it runs on the event loop alone, and needs no other time."""
    monkeypatch.setattr(rollout, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(rollout, "BREATH_BYTES", 1 << 10)
    torch.set_num_threads(1)
    rollout.model_folder()  # made once, and transformers imported, outside the time of the first check


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct server passes every check."""
    harness.assert_reference_passes(KIND, REFERENCE, tmp_path)


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    """A check finds its fault."""
    harness.assert_killed(KIND, REFERENCE, MUTANTS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    """The full matrix: no check is misled by the fault of another."""
    harness.assert_others_pass(KIND, REFERENCE, MUTANTS[name], tmp_path)


def test_every_check_is_killed_by_a_mutant() -> None:
    """Each check can fail."""
    harness.assert_every_check_kills(KIND, MUTANTS)
