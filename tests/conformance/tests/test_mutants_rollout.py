"""The suite of rollout servers is tested: each mutant is killed by the checks that it names, and no other."""

from __future__ import annotations

import pytest
import torch
from mutants import harness
from mutants.rollout import MUTANTS, REFERENCE

from jackfield_conformance.support import rollout


@pytest.fixture(autouse=True)
def _short_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a mutant never does is not waited for long; it runs on the event loop alone, and needs no other time."""
    monkeypatch.setattr(rollout, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(rollout, "BREATH_BYTES", 1 << 10)
    torch.set_num_threads(1)
    rollout.model_folder()  # made once, and transformers imported, outside the time of the first check


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("rollout", REFERENCE, MUTANTS)
