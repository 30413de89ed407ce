"""The suite of TransferQueue backends is tested: each mutant is killed by the checks that it names, and no other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mutants import harness
from mutants.transfer_queue import MUTANTS, OPEN, REFERENCE


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


(
    test_the_reference_passes,
    test_each_mutant_fails_its_checks,
    test_no_other_check_fails,
    test_every_check_is_killed_by_a_mutant,
) = harness.make_tests("transfer_queue", REFERENCE, MUTANTS)
