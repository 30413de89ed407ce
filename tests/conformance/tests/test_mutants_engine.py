"""Which check of training engines kills which mutant."""

from __future__ import annotations

from pathlib import Path

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


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct engine passes every check; of the two that start processes, each mutant of ranks passes one."""
    harness.assert_reference_passes("engine", REFERENCE, tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    """One fault is found by the checks that are for it."""
    harness.assert_killed("engine", REFERENCE, MUTANTS[name], tmp_path)


@pytest.mark.nightly
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    """The full matrix: no check is misled by the fault of another."""
    harness.assert_others_pass("engine", REFERENCE, MUTANTS[name], tmp_path)


def test_every_check_kills_a_mutant() -> None:
    """A check that nothing fails would prove nothing."""
    harness.assert_every_check_kills("engine", MUTANTS)
