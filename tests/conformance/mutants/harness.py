"""How the suites are tested: which check kills which mutant.

A kind's module here has ``REFERENCE`` (a small correct implementation) and ``MUTANTS``, each of which differs from it
in one behaviour. Its meta-test is::

    from mutants import harness
    from mutants.agent import MUTANTS, REFERENCE

    def test_the_reference_passes(tmp_path):
        harness.assert_reference_passes("agent", REFERENCE, tmp_path)

    @pytest.mark.parametrize("name", MUTANTS)
    def test_each_mutant_fails_its_checks(name, tmp_path):
        harness.assert_killed("agent", REFERENCE, MUTANTS[name], tmp_path)

    @pytest.mark.nightly
    @pytest.mark.parametrize("name", MUTANTS)
    def test_no_other_check_fails(name, tmp_path):
        harness.assert_others_pass("agent", REFERENCE, MUTANTS[name], tmp_path)

    def test_every_check_is_killed_by_a_mutant():
        harness.assert_every_check_kills("agent", MUTANTS)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs

from jackfield.settings import structure
from jackfield_conformance.registry import FIRST_BEHAVIOUR, Check, Outcome, checks, run_check
from jackfield_conformance.subject import Subject


@attrs.frozen(kw_only=True)
class Reference:
    """A correct implementation, and what its manifest would say."""

    cls: type
    config_class: type
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    capabilities: Mapping[str, str] = attrs.field(factory=dict)  #: name to level
    fixture: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Mutant:
    """The reference with one fault. What is None is the reference's."""

    cls: type
    killed_by: tuple[str, ...]  #: exactly these checks fail
    what: str  #: the fault, one sentence
    settings: Mapping[str, Any] | None = None
    capabilities: Mapping[str, str] | None = None
    fixture: Mapping[str, Any] | None = None


def behaviour_checks(kind: str) -> tuple[Check, ...]:
    """The checks of a kind that look at a running plugin; those of the structure have tests of their own."""
    return tuple(check for check in checks(kind) if check.number >= FIRST_BEHAVIOUR)


def subject_of(kind: str, reference: Reference, folder: Path, mutant: Mutant | None = None) -> Subject:
    """The subject that stands for the reference or for a mutant of it."""

    def choose(name: str) -> Any:
        own = getattr(mutant, name, None)
        return getattr(reference, name) if own is None else own

    settings = choose("settings")
    return Subject(
        kind=kind,
        name=mutant.cls.__name__ if mutant else "reference",
        cls=choose("cls"),
        config=structure(reference.config_class, settings),
        config_class=reference.config_class,
        settings=settings,
        capabilities=choose("capabilities"),
        fixture=choose("fixture"),
        folder=folder,
        abi=choose("cls").abi_version,
    )


def outcomes(
    kind: str,
    reference: Reference,
    folder: Path,
    mutant: Mutant | None = None,
    only: Iterable[str] | None = None,
) -> dict[str, Outcome]:
    """Run every applicable behaviour check, or ``only`` those named, each in a folder of its own; by id."""
    found: dict[str, Outcome] = {}
    wanted = None if only is None else set(only)
    for check in behaviour_checks(kind):
        if wanted is not None and check.id not in wanted:
            continue
        place = folder / check.id
        place.mkdir(parents=True)
        subject = subject_of(kind, reference, place, mutant)
        if check.applies(subject.abi, subject.capabilities):
            found[check.id] = run_check(check, subject)
    return found


def assert_reference_passes(kind: str, reference: Reference, folder: Path) -> None:
    """Every applicable check passes on the reference; one that is skipped has not passed, unless it wants hardware."""
    found = outcomes(kind, reference, folder)
    hardware = {check.id for check in behaviour_checks(kind) if check.tier == "gpu"}
    bad = {
        id: outcome
        for id, outcome in found.items()
        if outcome.status != "passed" and not (outcome.status == "skipped" and id in hardware)
    }
    assert {} == bad, _report(bad)
    assert found, f"no check of {kind} applies to the reference"


def assert_killed(kind: str, reference: Reference, mutant: Mutant, folder: Path) -> None:
    """The checks that the mutant names fail on it, and say why."""
    found = outcomes(kind, reference, folder, mutant, only=mutant.killed_by)
    alive = {id: outcome for id, outcome in found.items() if outcome.status != "failed"}
    assert sorted(mutant.killed_by) == sorted(found.keys() - alive.keys()), f"{mutant.what}\n{_report(alive)}"
    silent = [id for id, outcome in found.items() if not outcome.message]
    assert [] == silent, f"these checks fail without saying why: {silent}"


def assert_others_pass(kind: str, reference: Reference, mutant: Mutant, folder: Path) -> None:
    """No check fails on the mutant that it does not name: a check is misled by no other fault than its own."""
    others = {check.id for check in behaviour_checks(kind)} - set(mutant.killed_by)
    found = outcomes(kind, reference, folder, mutant, only=others)
    failed = {id: outcome for id, outcome in found.items() if outcome.status == "failed"}
    assert {} == failed, f"{mutant.what}\n{_report(failed)}"


def assert_every_check_kills(kind: str, mutants: Mapping[str, Mutant]) -> None:
    """Each check but those for hardware is named by a mutant, and mutants name checks that exist."""
    known = {check.id for check in behaviour_checks(kind) if check.tier != "gpu"}
    killing = {id for mutant in mutants.values() for id in mutant.killed_by}
    assert set() == killing - {check.id for check in behaviour_checks(kind)}, "mutants name checks that do not exist"
    assert set() == known - killing, "no mutant is killed by these checks"


def _report(found: Mapping[str, Outcome]) -> str:
    return "\n".join(f"{id} {outcome.status}: {outcome.message}" for id, outcome in found.items())
