"""How checks are declared, chosen, run and counted."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from jackfield.plugins.registry import GROUPS as KINDS
from jackfield_conformance.registry import (
    EVERY_KIND,
    PREFIXES,
    Check,
    NotApplicable,
    Outcome,
    Skipped,
    Subject,
    capabilities,
    check,
    checks,
    run_check,
)
from jackfield_conformance.runner import level_of, level_table

ALL = [each for kind in KINDS for each in checks(kind)]


def subject(folder: Path) -> Subject:
    """Of a plugin that no check here looks at."""
    return Subject(kind="reward", name="none", cls=None, config=None, config_class=None, folder=folder)


def make(function: Callable[[Subject], Awaitable[None] | None], **options: Any) -> Check:
    """A check that is not registered."""
    fields = {"id": "REW-900", "kind": "reward", "tier": "base", "since": "1.0", "capability": None}
    return Check(**{**fields, "invariant": "It holds", "page": "page", "function": function, **options})


def test_every_kind_has_a_prefix_and_a_suite() -> None:
    assert set(KINDS) == set(PREFIXES)
    assert len(PREFIXES) == len(set(PREFIXES.values()))
    assert [] == [kind for kind in KINDS if not any(each.number >= 10 for each in checks(kind))]


def test_checks_are_in_order_and_say_what_holds() -> None:
    for kind in KINDS:
        ids = [each.id for each in checks(kind)]
        assert sorted(ids) == ids
        assert len(ids) == len(set(ids))
    for each in ALL:
        assert each.id.startswith(PREFIXES[each.kind] if each.kind else EVERY_KIND)
        assert 20 < len(each.invariant) < 200, each.id
        assert each.page.startswith("docs/"), each.id
        assert (each.tier == "capability") <= (each.capability is not None), each.id


def test_capabilities_of_checks_are_declared_by_their_suite() -> None:
    """A check of a capability that no manifest may declare would never run."""
    assert set() == {(each.id, each.capability) for each in ALL if each.capability} - {
        (each.id, name) for each in ALL if each.kind for name in capabilities(each.kind)
    }


@pytest.mark.parametrize(
    ("since", "capability", "abi", "declared", "expected"),
    [
        ("1.0", None, "1.0", {}, True),
        ("1.1", None, "1.0", {}, False),
        ("1.1", None, "1.10", {}, True),
        ("1.0", "lora", "1.0", {}, False),
        ("1.0", "lora", "1.0", {"lora": "partial"}, True),
        ("1.0", "lora", "1.0", {"lora": "unverified"}, False),
        ("1.0", "lora", "1.0", {"lora": "unsupported"}, False),
    ],
)
def test_the_abi_and_the_capabilities_decide_what_applies(
    since: str, capability: str | None, abi: str, declared: dict[str, str], expected: bool
) -> None:
    assert expected is make(lambda _: None, since=since, capability=capability).applies(abi, declared)


def _fails(_: Subject) -> None:
    raise AssertionError("expected 1, found 2")


def _crashes(_: Subject) -> None:
    raise OSError("the disk is full")


def _skips(_: Subject) -> None:
    raise Skipped("no such hardware")


def _says_nothing(_: Subject) -> None:
    raise NotApplicable("the fixture gives none")


async def _cancelled(_: Subject) -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("function", "status", "says"),
    [
        (lambda _: None, "passed", ""),
        (_fails, "failed", "expected 1, found 2"),
        (_crashes, "failed", "OSError: the disk is full"),
        (_skips, "skipped", "no such hardware"),
        (_says_nothing, "not_applicable", "the fixture gives none"),
        (_cancelled, "failed", "CancelledError"),
    ],
)
def test_a_check_ends_in_one_way(function: Any, status: str, says: str, tmp_path: Path) -> None:
    outcome = run_check(make(function), subject(tmp_path))
    assert status == outcome.status
    assert says in outcome.message


async def _waits(_: Subject) -> None:
    await asyncio.Event().wait()


async def _blocks(_: Subject) -> None:
    threading.Event().wait()


async def _swallows(_: Subject) -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        await asyncio.Event().wait()


@pytest.mark.parametrize("function", [_waits, _blocks, _swallows])
def test_a_check_without_end_fails_at_its_deadline(
    function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it waits, blocks the event loop or does not hear that it is cancelled."""
    monkeypatch.setattr("jackfield_conformance.registry._GRACE_SECONDS", 0.1)
    outcome = run_check(make(function, deadline_seconds=0.1), subject(tmp_path))
    assert "failed" == outcome.status
    assert "did not end within" in outcome.message


def test_an_id_is_used_once() -> None:
    with pytest.raises(AssertionError, match="two checks have the id REW-010"):

        @check("REW-010")
        def another(_: Subject) -> None:
            """Something holds."""


def test_a_check_needs_an_invariant() -> None:
    with pytest.raises(AssertionError, match="no docstring"):

        @check("REW-998")
        def nameless(_: Subject) -> None:
            pass


def results(**statuses: Any) -> list[Outcome]:
    """One outcome per keyword: ``base_2="passed"``."""
    return [
        Outcome(check=make(lambda _: None, tier=name.rpartition("_")[0]), status=status)
        for name, status in statuses.items()
    ]


@pytest.mark.parametrize(
    ("expected", "found"),
    [
        ("none", results()),
        ("none", results(base_1="not_run")),
        ("none", results(base_1="passed", base_2="failed")),
        ("none", results(base_1="passed", stress_1="failed")),
        ("partial", results(base_1="passed", base_2="skipped")),
        ("partial", results(base_1="passed", base_2="exempt")),
        ("partial", results(base_1="passed", base_2="not_run")),
        ("base", results(base_1="passed", capability_1="skipped")),
        ("base", results(base_1="passed", capability_1="exempt")),
        ("base", results(base_1="passed", capability_1="not_run")),
        ("full", results(base_1="passed")),
        ("full", results(base_1="passed", base_2="not_applicable", capability_1="not_applicable")),
        ("full", results(base_1="passed", capability_1="passed", stress_1="not_run", gpu_1="skipped")),
        ("base", results(base_1="passed", capability_1="passed", stress_1="exempt")),
    ],
)
def test_only_what_ran_and_passed_counts(expected: str, found: list[Outcome]) -> None:
    assert expected == level_of(found)


def test_the_table_counts_per_tier() -> None:
    row = {"kind": "reward", "plugin": "x", "level": "base", "abi": "1.0", "seconds": 1.25}
    found = results(base_1="passed", base_2="exempt", capability_1="not_applicable", stress_1="passed")
    header, line = level_table([{**row, "checks": [each.as_dict() for each in found]}])
    assert ["PLUGIN", "LEVEL", "ABI", "BASE", "CAPABILITY", "STRESS", "GPU"] == header.split()[:7]
    assert ["reward:x", "base", "1.0", "1/2", "-", "1/1", "-", "1", "1.2"] == line.split()
