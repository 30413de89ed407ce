"""The fixture of the tests from outside: commands start, print, end and are ended as in a shell."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from jackfield_commands import CommandServer

pytestmark = pytest.mark.timeout(180)


def test_a_command_prints_and_ends_with_its_code(jackfield: CommandServer) -> None:
    assert 0 == jackfield("--version").code
    wrong = jackfield("plugins", "check", "no-such-plugin")
    assert (2, True) == (wrong.code, "no-such-plugin" in wrong.error)
    assert 2 == jackfield("no-such-command").code


def test_a_run_and_one_that_a_signal_ends(
    jackfield: CommandServer, quickstart_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    done = jackfield("run", *quickstart_settings("whole"))
    assert 0 == done.code, done.error
    steps = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert steps
    command = jackfield.start("run", *quickstart_settings("killed", "schedule.steps=100000"))
    command.send(signal.SIGKILL)
    assert 128 + signal.SIGKILL == command.wait(60).code
