"""Importing large libraries."""

from __future__ import annotations

import gc
import sys
from types import ModuleType

import pytest

from jackfield import imports
from jackfield.imports import collection_paused


def test_collection_goes_on_after_what_fails() -> None:
    states = []

    @collection_paused()
    def fails() -> None:
        states.append(gc.isenabled())
        raise ImportError

    with pytest.raises(ImportError):
        fails()
    assert [False, True] == [*states, gc.isenabled()]


def test_collection_stays_off_for_who_turned_it_off() -> None:
    gc.disable()
    try:
        with collection_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize(("own", "modules", "expected"), [(True, 3, True), (True, 2, False), (False, 3, False)])
def test_what_a_large_import_brings_is_never_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, own: bool, modules: int, expected: bool
) -> None:
    """In a process of our own. Elsewhere it would be somebody's memory; and for a few modules it is not worth it."""
    monkeypatch.setattr(imports, "_LARGE", 3)
    monkeypatch.setattr(imports, "_own", own)
    before = gc.get_freeze_count()
    with collection_paused():
        for number in range(modules):
            monkeypatch.setitem(sys.modules, f"large_{number}", ModuleType("large"))
    assert expected == (gc.get_freeze_count() > before)
