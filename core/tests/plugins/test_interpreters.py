"""Interpreters: missing, broken, silent, old, or without Jackfield; each with a deadline."""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jackfield import __version__
from jackfield.errors import PluginError
from jackfield.plugins.interpreters import environment_of, look, resolve_interpreter


def script(folder: Path, text: str, name: str = "python") -> str:
    """Create a program that replaces an interpreter."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_this_interpreter_is_fine():
    report = look(None)
    assert report.usable
    assert () == report.problems
    assert (sys.executable, sys.version.split()[0]) == (report.path, report.python)
    assert __version__ == report.versions["jackfield"]


def test_a_missing_interpreter_has_a_code_and_a_fix(tmp_path: Path):
    report = look(str(tmp_path / "absent" / "bin" / "python"))
    (problem,) = report.problems
    assert not report.usable
    assert "plugin.interpreter" == problem.code
    assert "no such file" == problem.found
    assert problem.fix


def test_a_file_that_is_no_program_is_told_apart(tmp_path: Path):
    (tmp_path / "python").write_text("text")
    with pytest.raises(PluginError) as caught:
        resolve_interpreter(str(tmp_path / "python"))
    assert "a file that cannot be executed" == caught.value.found


def test_a_program_that_the_system_cannot_start(tmp_path: Path):
    path = tmp_path / "python"
    path.write_bytes(b"\x00\x01\x02")
    path.chmod(0o755)
    report = look(str(path))
    (problem,) = report.problems
    assert not report.usable
    assert "plugin.interpreter" == problem.code
    assert "OSError" in str(problem.found)


def test_a_command_is_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert script(tmp_path, "exit 0", "mypython") == resolve_interpreter("mypython")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("echo 'no library' >&2; exit 3", "exit code 3, no library"),
        ("echo hello", "exit code 0"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
    ],
)
def test_an_interpreter_that_does_not_work_says_how_it_ended(tmp_path: Path, text: str, found: str):
    report = look(script(tmp_path, text))
    (problem,) = report.problems
    assert not report.usable
    assert ("plugin.interpreter", found) == (problem.code, problem.found)


def ended(pid: int) -> bool:
    """Wait until another process is gone, since a kill takes effect a moment after it was sent."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 10)[0])
    finally:
        os.close(descriptor)


def test_an_interpreter_that_does_not_answer_costs_the_deadline_and_no_more(tmp_path: Path):
    """`sleep` runs in a grandchild, which keeps the output open and must also be killed."""
    marker = tmp_path / "pid"
    report = look(script(tmp_path, f"sleep 600 & echo $! > {marker}; wait"), seconds=0.5)
    (problem,) = report.problems
    assert not report.usable
    assert "plugin.interpreter" == problem.code
    assert str(problem.found).startswith("no end within 0.5 s")
    assert 0.5 <= report.seconds
    assert ended(int(marker.read_text()))


def test_a_child_that_leaves_a_grandchild_behind_is_not_waited_for(tmp_path: Path):
    report = look(script(tmp_path, "sleep 600 & echo done"), seconds=300)
    assert "exit code 0" == report.problems[0].found


def test_an_interpreter_without_jackfield_is_told_what_to_install(tmp_path: Path):
    python = script(tmp_path, f'exec {sys.executable} -I -S "$@"')
    report = look(python)
    (problem,) = report.problems
    assert not report.usable
    assert "plugin.requirement" == problem.code
    assert f"{python} -m pip install jackfield" == problem.fix


def test_an_old_python_is_refused(tmp_path: Path):
    answer = '{"python": "3.9.1", "versions": {"jackfield": "0.1", "torch": null, "ray": null}}'
    report = look(script(tmp_path, f"echo '{answer}'"))
    (problem,) = report.problems
    assert not report.usable
    assert ("plugin.interpreter", "Python 3.9.1, jackfield 0.1") == (problem.code, problem.found)


def test_import_settings_of_this_interpreter_do_not_reach_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    other = script(tmp_path, "echo path=$PYTHONPATH safe=$PYTHONSAFEPATH")
    run: Any = functools.partial(subprocess.run, capture_output=True, text=True, timeout=50, check=True)
    assert "path= safe=1\n" == run([other], env=environment_of(other)).stdout
    own = run([sys.executable, "-c", "import sys; print(sys.path)"], env=environment_of(sys.executable)).stdout
    assert str(tmp_path) in own
    assert "''" not in own  # nor does the working directory
