"""Importing large libraries."""

from __future__ import annotations

import gc
import subprocess
import sys
from types import ModuleType

import pytest

from jackfield import imports
from jackfield.imports import collection_paused, own_process


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


def test_only_own_processes_collect_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and workers say that a process is theirs. A program that calls a run keeps its own thresholds."""
    monkeypatch.setattr(imports, "_own", False)
    text = "import gc; before = gc.get_threshold(); import jackfield.compose; print(before == gc.get_threshold())"
    asked = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=50)
    assert "True" == asked.stdout.strip()
    before, usual = gc.get_threshold(), (700, 10, 10)
    gc.set_threshold(*usual)  # a command in this process may have raised them
    try:
        own_process()
        assert all(now > then for now, then in zip(gc.get_threshold(), usual, strict=True))
    finally:
        gc.set_threshold(*before)
