"""Commands of other packages: they are listed without an import, and a missing package says how to install it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from jackfield.cli import main
from jackfield.cli.commands import LazyGroup, plugins
from jackfield.imports import LOG_LEVEL


@pytest.mark.parametrize(("group", "name"), [(main, "bench"), (plugins, "new")])
def test_a_missing_package_is_named_with_its_fix(monkeypatch: pytest.MonkeyPatch, group: LazyGroup, name: str) -> None:
    monkeypatch.setattr(group, "lazy", {**group.lazy, name: ("jackfield_absent.command", "")})
    monkeypatch.setattr(group, "commands", {each: one for each, one in group.commands.items() if each != name})
    path = [name] if group is main else ["plugins", name]
    refused = CliRunner().invoke(main, [*path, "x"])
    assert 2 == refused.exit_code
    assert f"[plugin.requirement] jackfield {' '.join(path)} needs jackfield-absent" in refused.stderr.replace(
        "main", "jackfield"
    )
    assert f"fix: {sys.executable} -m pip install jackfield-absent" in refused.stderr
    listed = CliRunner().invoke(main, [*path[:-1], "--help"])
    assert (0, True) == (listed.exit_code, f"  {name}" in listed.stdout)


def test_commands_are_listed_once_and_in_order() -> None:
    context = click.Context(main)
    names = main.list_commands(context)
    assert sorted({*names}) == names
    assert {"bench", "run", "plugins"} <= {*names}


def test_the_log_level_holds_for_this_process_and_for_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOG_LEVEL, "")  # so that it is restored
    log = logging.getLogger("jackfield")
    monkeypatch.setattr(log, "level", log.level)
    assert 0 == CliRunner().invoke(main, ["--log-level", "info", "algorithms", "show", "grpo"]).exit_code
    assert (logging.INFO, "info") == (log.level, os.environ[LOG_LEVEL])
    code = "import logging; from jackfield.imports import own_process; own_process()\n"
    code += "log = logging.getLogger('jackfield'); log.debug('quiet'); log.info('said')"
    worker = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True)
    assert ["said"] == [line.rpartition(": ")[2] for line in worker.stderr.splitlines()]
    assert worker.stderr.startswith("INFO ")


def test_an_unknown_log_level_is_wrong_usage() -> None:
    refused = CliRunner().invoke(main, ["--log-level", "loud", "algorithms", "list"])
    assert 2 == refused.exit_code
    assert "'debug', 'info', 'warning', 'error'" in refused.stderr


@pytest.mark.parametrize(
    ("words", "offered"), [("jackfield algo", {"algorithms"}), ("jackfield config ", {"schema", "show", "validate"})]
)
def test_the_shell_completes_commands(words: str, offered: set[str]) -> None:
    """As bash asks, with what `_JACKFIELD_COMPLETE=bash_source jackfield` prints."""
    *before, _ = words.split(" ")
    asked = {"_JACKFIELD_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(before))}
    command = [str(Path(sys.executable).with_name("jackfield"))]
    done = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, timeout=50, check=True)
    assert offered <= {line.partition(",")[2] for line in done.stdout.splitlines()}, done.stderr
