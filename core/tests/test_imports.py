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


def test_what_a_large_import_brings_is_never_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few modules more do not count: what was garbage before would stay."""
    monkeypatch.setattr(imports, "_LARGE", 3)
    found = []
    for number in (2, 3):
        before = gc.get_freeze_count()
        with collection_paused():
            for each in range(number):
                monkeypatch.setitem(sys.modules, f"large_{number}_{each}", ModuleType("large"))
        found.append(gc.get_freeze_count() > before)
    assert [False, True] == found
