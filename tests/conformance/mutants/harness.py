"""How the suites are tested: which check kills which mutant.

The module of a kind has ``REFERENCE``, a small correct implementation, and ``MUTANTS``, each with one fault.
``make_tests`` makes the tests of a kind from them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest

from jackfield.settings import structure
from jackfield_conformance.registry import FIRST_BEHAVIOUR, PREFIXES, Check, Outcome, Subject, checks, run_check


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
    """The reference with one fault. A field that is None is the reference's."""

    cls: type
    killed_by: tuple[str, ...]  #: exactly these checks fail
    what: str  #: the fault, one sentence
    settings: Mapping[str, Any] | None = None
    capabilities: Mapping[str, str] | None = None
    fixture: Mapping[str, Any] | None = None


def mutant(kind: str, cls: type, what: str, numbers: str, **fields: Any) -> Mutant:
    """Make a mutant from its class, its fault, and the numbers of the checks that fail, separated by spaces."""
    killed_by = tuple(f"{PREFIXES[kind]}-{number}" for number in numbers.split())
    return Mutant(cls=cls, killed_by=killed_by, what=what, **fields)


def named(*mutants: Mutant) -> dict[str, Mutant]:
    """Return mutants by the names of their classes, which must differ."""
    found = {mutant.cls.__name__: mutant for mutant in mutants}
    assert len(found) == len(mutants), "two mutants have one name"
    return found


def make_tests(kind: str, reference: Reference, mutants: Mapping[str, Mutant], timeout: float = 60) -> Any:
    """Return the tests of a suite, to be named in its test module."""
    each = pytest.mark.parametrize("name", mutants)

    def reference_passes(tmp_path: Path) -> None:
        """The correct implementation passes every check."""
        assert_reference_passes(kind, reference, tmp_path)

    @each
    @pytest.mark.timeout(timeout)
    def each_mutant_fails_its_checks(name: str, tmp_path: Path) -> None:
        """The checks that a fault concerns find it."""
        assert_killed(kind, reference, mutants[name], tmp_path)

    @each
    @pytest.mark.nightly
    @pytest.mark.timeout(timeout)
    def no_other_check_fails(name: str, tmp_path: Path) -> None:
        """The full matrix: a fault misleads no other check."""
        assert_others_pass(kind, reference, mutants[name], tmp_path)

    def every_check_is_killed() -> None:
        """Each check can fail."""
        assert_every_check_kills(kind, mutants)

    return reference_passes, each_mutant_fails_its_checks, no_other_check_fails, every_check_is_killed


def behaviour_checks(kind: str) -> tuple[Check, ...]:
    """Return the checks of a kind that run a plugin; those of the structure have separate tests."""
    return tuple(check for check in checks(kind) if check.number >= FIRST_BEHAVIOUR)


def subject_of(kind: str, reference: Reference, folder: Path, mutant: Mutant | None = None) -> Subject:
    """Return the subject of the reference or of a mutant."""

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
    """Run every applicable behaviour check, or ``only`` these, each in its own folder; return outcomes by id."""
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
    """Require that every applicable check passes on the reference; only checks that need hardware may be skipped."""
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
    """Require that the checks which the mutant names fail on it with a message."""
    found = outcomes(kind, reference, folder, mutant, only=mutant.killed_by)
    alive = {id: outcome for id, outcome in found.items() if outcome.status != "failed"}
    assert sorted(mutant.killed_by) == sorted(found.keys() - alive.keys()), f"{mutant.what}\n{_report(alive)}"
    silent = [id for id, outcome in found.items() if not outcome.message]
    assert [] == silent, f"these checks fail without saying why: {silent}"


def assert_others_pass(kind: str, reference: Reference, mutant: Mutant, folder: Path) -> None:
    """Require that no other check fails on the mutant."""
    others = {check.id for check in behaviour_checks(kind)} - set(mutant.killed_by)
    found = outcomes(kind, reference, folder, mutant, only=others)
    failed = {id: outcome for id, outcome in found.items() if outcome.status == "failed"}
    assert {} == failed, f"{mutant.what}\n{_report(failed)}"


def assert_every_check_kills(kind: str, mutants: Mapping[str, Mutant]) -> None:
    """Require that mutants name every check that needs no hardware, and only existing checks."""
    known = {check.id for check in behaviour_checks(kind) if check.tier != "gpu"}
    killing = {id for mutant in mutants.values() for id in mutant.killed_by}
    assert set() == killing - {check.id for check in behaviour_checks(kind)}, "mutants name checks that do not exist"
    assert set() == known - killing, "no mutant is killed by these checks"


def _report(found: Mapping[str, Outcome]) -> str:
    return "\n".join(f"{id} {outcome.status}: {outcome.message}" for id, outcome in found.items())
