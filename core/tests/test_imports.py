"""Importing large libraries."""

from __future__ import annotations

import gc

import pytest

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
