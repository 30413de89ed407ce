"""The suite of TransferQueue backends is tested: each mutant is killed by the checks that it names, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from mutants import harness
from mutants.transfer_queue import MUTANTS, OPEN, REFERENCE

KIND = "transfer_queue"


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


def test_the_reference_passes(tmp_path: Path) -> None:
    """A correct backend passes every check."""
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
