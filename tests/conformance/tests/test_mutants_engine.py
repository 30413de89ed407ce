"""Which check of training engines kills which mutant."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from mutants import harness  # noqa: E402
from mutants.engine import MUTANTS, REFERENCE  # noqa: E402

from jackfield_conformance.support import engine as support  # noqa: E402


@pytest.fixture(autouse=True)
def _one_layer_and_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seventy engines pass fifty checks each: the smallest model and no threads."""
    monkeypatch.setattr(support, "LAYERS", 1)
    torch.set_num_threads(1)


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("engine", REFERENCE, MUTANTS, timeout=240)
