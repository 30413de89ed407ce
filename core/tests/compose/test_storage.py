"""Tests that a full disk gives one clear error and leaves files unchanged."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from jackfield.compose.run import _first, storage_errors
from jackfield.errors import JackfieldError, RunError


def refusal(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def test_what_the_system_refuses_around_the_folder_is_about_the_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, storage_errors(tmp_path):
        raise refusal(errno.EACCES)
    assert ("run.storage", str(tmp_path)) == (caught.value.code, caught.value.where)
    assert "Permission denied" in str(caught.value.found)


@pytest.mark.parametrize(("number", "code"), [(errno.ENOSPC, "run.storage"), (errno.ECONNRESET, "run.failed")])
def test_in_a_run_only_what_a_disk_says_is_about_the_disk(tmp_path: Path, number: int, code: str) -> None:
    error = _first(ExceptionGroup("tasks", [ExceptionGroup("inner", [refusal(number)])]), tmp_path)
    assert isinstance(error, JackfieldError)
    assert code == error.code
    assert os.strerror(number) in str(error)
