"""Which check of operators kills which mutant."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutants import harness
from mutants.operator import LEAKED, MUTANTS, REFERENCES


@pytest.fixture(autouse=True)
def _nothing_is_left() -> None:
    LEAKED.clear()


@pytest.mark.parametrize("name", REFERENCES)
def test_a_reference_of_each_type_passes(name: str, tmp_path: Path) -> None:
    """What is said of other types does not apply to it."""
    found = harness.outcomes("operator", REFERENCES[name], tmp_path)
    bad = {id: one.message for id, one in found.items() if one.status not in ("passed", "not_applicable")}
    assert {} == bad


def test_every_check_applies_to_a_reference(tmp_path: Path) -> None:
    passed = set[str]()
    for name, reference in REFERENCES.items():
        found = harness.outcomes("operator", reference, tmp_path / name)
        passed |= {id for id, one in found.items() if one.status == "passed"}
    assert {check.id for check in harness.behaviour_checks("operator")} == passed


@pytest.mark.parametrize("name", MUTANTS)
def test_each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
    reference, mutant = MUTANTS[name]
    harness.assert_killed("operator", REFERENCES[reference], mutant, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_no_other_check_fails(name: str, tmp_path: Path) -> None:
    reference, mutant = MUTANTS[name]
    harness.assert_others_pass("operator", REFERENCES[reference], mutant, tmp_path)


def test_every_check_is_killed_by_a_mutant() -> None:
    harness.assert_every_check_kills("operator", {name: mutant for name, (_, mutant) in MUTANTS.items()})
